#include "own_team.hpp"

#include <pthread.h>
#include <sched.h>

#include <system_error>
#include <utility>

#include "pace.hpp"

namespace cpulaunch {

void pin_this_thread(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

OwnTeam::OwnTeam(std::vector<int> cores)
    : cl_team{static_cast<int32_t>(cores.size()), /*polls=*/1,
              [](const cl_team* self, int32_t count, void (*part)(void*, int32_t), void* argument) {
                // No team is const: the interface only declares it so.
                auto& team = *const_cast<OwnTeam*>(static_cast<const OwnTeam*>(self));
                team.run_parts(count, {part, argument});
              }},
      cores_(std::move(cores)) {}

OwnTeam::~OwnTeam() {
  for (auto& helper : helpers_) {
    helper.ends = true;
    wake(helper);
    helper.thread.join();
  }
}

void OwnTeam::run_parts(int32_t count, const Parts& parts) {
  start(count - 1);
  for (auto& helper : helpers_) {
    if (helper.index >= count) break;
    helper.parts = &parts;
    wake(helper);
  }
  parts.run(parts.argument, 0);
  // The parts of helpers that could not be started.
  for (auto index = static_cast<int32_t>(helpers_.size()) + 1; index < count; ++index) {
    parts.run(parts.argument, index);
  }
  for (auto& helper : helpers_) {
    for (unsigned polls = 0; helper.parts.load(std::memory_order_acquire); ++polls) {
      if (rest_of_poller({}, polls, {}) == Rest::spin) {
        relax();
      } else {
        sched_yield();
      }
    }
  }
}

// Starts helpers until there are `count`, or until the system allows no more threads.
void OwnTeam::start(size_t count) {
  while (helpers_.size() < count) {
    const auto index = static_cast<int32_t>(helpers_.size()) + 1;
    auto& helper = helpers_.emplace_back(index, cores_[index]);
    try {
      helper.thread = std::thread([&helper] { work(helper); });
    } catch (const std::system_error&) {
      helpers_.pop_back();
      return;
    }
  }
}

void OwnTeam::work(Helper& helper) {
  pthread_setname_np(pthread_self(), "cpulaunch-copy");
  if (helper.core >= 0) pin_this_thread(helper.core);
  while (const auto* parts = next(helper)) {
    parts->run(parts->argument, helper.index);
    helper.parts.store(nullptr, std::memory_order_release);
  }
}

// Waits for the next parts.  Returns null when the helper has to end.
const OwnTeam::Parts* OwnTeam::next(Helper& helper) {
  for (unsigned polls = 0; !helper.ends; ++polls) {
    if (const auto* parts = helper.parts.load(std::memory_order_acquire)) return parts;
    const auto rest = helper.core < 0 ? Rest::nap : rest_of_poller({}, polls, {});
    if (rest == Rest::spin) {
      relax();
    } else if (rest == Rest::yield) {
      sched_yield();
    } else {
      std::unique_lock<std::mutex> lock(helper.mutex);
      // Set before `parts` is checked again: wake() reads it after `parts` was set.
      helper.sleeps = true;
      helper.wake.wait(lock, [&] { return helper.ends || helper.parts; });
      helper.sleeps = false;
    }
  }
  return nullptr;
}

void OwnTeam::wake(Helper& helper) {
  if (!helper.sleeps) return;
  std::lock_guard<std::mutex> lock(helper.mutex);
  helper.wake.notify_one();
}

}  // namespace cpulaunch
