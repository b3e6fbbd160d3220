#include "idle_memory.hpp"

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <mutex>
#include <set>

namespace cpulaunch {

namespace {

constexpr IdleMemory::Time kBetweenLooks = std::chrono::seconds(1);

struct Groups {
  std::mutex mutex;
  std::set<IdleMemory*> all;
  std::atomic<IdleMemory::Time> next_look{IdleMemory::Time::zero()};
};

// Never destroyed, because groups may outlive everything else.  The mutex is usable after a fork, because a forked
// process destroys its copies of the groups.
Groups& groups() {
  static auto* its = [] {
    pthread_atfork([] { groups().mutex.lock(); }, [] { groups().mutex.unlock(); }, [] { groups().mutex.unlock(); });
    return new Groups;
  }();
  return *its;
}

}  // namespace

// Reads the coarse clock, which is fast, because each operation calls this.
IdleMemory::Time IdleMemory::now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

void IdleMemory::join() {
  std::lock_guard<std::mutex> lock(groups().mutex);
  groups().all.insert(this);
}

void IdleMemory::leave() {
  std::lock_guard<std::mutex> lock(groups().mutex);
  groups().all.erase(this);
}

void IdleMemory::look_after_others() {
  auto& its = groups();
  const auto time = now();
  if (time < its.next_look.load(std::memory_order_relaxed)) return;
  std::unique_lock<std::mutex> lock(its.mutex, std::try_to_lock);
  if (!lock) return;
  its.next_look.store(time + kBetweenLooks, std::memory_order_relaxed);
  for (auto* each : its.all) each->give_back(time);
}

}  // namespace cpulaunch
