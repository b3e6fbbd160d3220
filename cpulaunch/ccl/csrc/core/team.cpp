#include "team.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include "plain_numbers.hpp"
#include "shared_slots.hpp"

namespace cpulaunch {

namespace {

// The least number of bytes that a thread reads and writes.  For fewer, waking the thread would take longer than the
// work itself.
constexpr size_t kLeastWork = 64 << 10;
// Jobs are cut at multiples of this size, which a step of a sum's loop takes (kSumGranule).
constexpr size_t kGranule = 256;

thread_local const cl_team* team_of_thread = nullptr;
thread_local Moved moved;

}  // namespace

Moved moved_by_this_thread() { return moved; }

const cl_team* lend_team(const cl_team* team) { return std::exchange(team_of_thread, team); }
const cl_team* lent_team() { return team_of_thread; }

std::exception_ptr run_on_team(size_t parts, const std::function<void(size_t)>& part) {
  struct Shared {
    const std::function<void(size_t)>& part;
    std::mutex mutex;
    std::exception_ptr failure;
  } shared{part, {}, {}};
  const auto run_one = [](void* argument, int32_t index) {
    auto& its = *static_cast<Shared*>(argument);
    try {
      const PlainNumbers plain;
      its.part(index);
    } catch (...) {
      std::lock_guard<std::mutex> lock(its.mutex);
      its.failure = std::current_exception();
    }
  };
  if (parts == 1) {
    run_one(&shared, 0);
  } else {
    team_of_thread->run(team_of_thread, static_cast<int32_t>(parts), run_one, &shared);
  }
  return shared.failure;
}

void Batch::copy(char* to, const char* from, size_t bytes, const Copy& how) {
  if (to != from) add_job({to, from, bytes, how});
}

void Batch::sum(Reduce* reduce, char* to, size_t bytes, int divisor) {
  Job job{to, nullptr, bytes, Copy(0)};
  job.reduce = reduce;
  job.first = summed_;
  job.sources = sources_.size() - summed_;
  job.divisor = divisor;
  summed_ = sources_.size();
  add_job(job);
}

void Batch::read(const SharedSlots& slots, int local, char* to, uint64_t address, size_t bytes) {
  Job job{to, nullptr, bytes, Copy(0)};
  job.slots = &slots;
  job.local = local;
  job.address = address;
  add_job(job);
}

void Batch::add_job(const Job& job) {
  if (job.bytes) jobs_.push_back(job);
  if (!team_of_thread) run();
}

void Batch::run() {
  size_t weight = 0;
  for (const auto& job : jobs_) weight += job.weight();
  const size_t threads = team_of_thread ? team_of_thread->size : 1;
  const auto parts = std::clamp<size_t>(weight / kLeastWork, 1, threads);
  const auto failure = run_on_team(parts, [&](size_t index) { run_part(index, parts); });
  clear();
  if (failure) std::rethrow_exception(failure);
}

void Batch::clear() {
  jobs_.clear();
  sources_.clear();
  summed_ = 0;
}

// Each part is a stretch of all jobs, with an equal number of bytes to read and write.
void Batch::run_part(size_t index, size_t parts) const {
  size_t weight = 0, before = 0;
  for (const auto& job : jobs_) weight += job.weight();
  const size_t from = weight * index / parts, to = weight * (index + 1) / parts;
  for (const auto& job : jobs_) {
    const auto cut = [&](size_t at) {  // how many bytes of this job lie before `at`
      if (at >= before + job.weight()) return job.bytes;
      return at <= before ? 0 : (at - before) / (job.sources + 1) / kGranule * kGranule;
    };
    const size_t begin = cut(from), end = cut(to);
    if (begin < end) run_stretch(job, begin, end);
    before += job.weight();
  }
}

void Batch::run_stretch(const Job& job, size_t begin, size_t end) const {
  const size_t bytes = end - begin;
  (job.reduce ? moved.summed : moved.copied) += bytes * job.sources;
  if (job.reduce) {
    thread_local std::vector<const char*> from;
    from.assign(sources_.begin() + job.first, sources_.begin() + job.first + job.sources);
    for (auto& each : from) each += begin;
    job.reduce(job.to + begin, from.data(), from.size(), bytes, job.divisor);
  } else if (job.slots) {
    job.slots->read(job.local, job.to + begin, job.address + begin, bytes);
  } else {
    job.how.run(job.to + begin, job.from + begin, bytes);
  }
}

}  // namespace cpulaunch
