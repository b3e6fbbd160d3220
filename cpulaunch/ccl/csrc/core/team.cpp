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

// Bytes that a thread reads and writes at least: for less, waking it takes longer than doing its part.
constexpr size_t kLeastWork = 64 << 10;
// Where a job is cut, but for its end: what is summed takes as much in a step of its loop (kSumGranule).
constexpr size_t kGranule = 256;

thread_local const cl_team* lent_team = nullptr;
thread_local Moved moved;

}  // namespace

Moved moved_by_this_thread() { return moved; }

const cl_team* lend_team(const cl_team* team) { return std::exchange(lent_team, team); }

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
  if (!lent_team) run();
}

void Batch::run() {
  size_t weight = 0;
  for (const auto& job : jobs_) weight += job.weight();
  const size_t threads = lent_team ? lent_team->size : 1;
  struct Shared {
    const Batch& batch;
    const int32_t parts;
    std::mutex mutex;
    std::exception_ptr failure;
  } shared{*this, static_cast<int32_t>(std::clamp<size_t>(weight / kLeastWork, 1, threads)), {}, {}};
  const auto run_one = [](void* argument, int32_t index) {
    auto& its = *static_cast<Shared*>(argument);
    try {
      const PlainNumbers plain;
      its.batch.run_part(index, its.parts);
    } catch (...) {
      std::lock_guard<std::mutex> lock(its.mutex);
      its.failure = std::current_exception();
    }
  };
  if (shared.parts == 1) {
    run_one(&shared, 0);
  } else {
    lent_team->run(lent_team, shared.parts, run_one, &shared);
  }
  clear();
  if (shared.failure) std::rethrow_exception(shared.failure);
}

void Batch::clear() {
  jobs_.clear();
  sources_.clear();
  summed_ = 0;
}

// The jobs lie in a row, by what they read and write, and each part is a stretch of that.
void Batch::run_part(size_t index, size_t parts) const {
  size_t weight = 0, before = 0;
  for (const auto& job : jobs_) weight += job.weight();
  const size_t from = weight * index / parts, to = weight * (index + 1) / parts;
  for (const auto& job : jobs_) {
    const auto cut = [&](size_t at) {  // the bytes of this job that are before that
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
