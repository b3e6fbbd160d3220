// The threads of communication, if the plan gives a rank several cores for it.
//
// The background thread that drives operations lends them to the core, which gives each an equal part of the copies and
// sums, and of the connections to other hosts.  They are not OpenMP's, which would start another team for each
// background thread.

#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "interface.h"

namespace cpulaunch {

// One thread at a time lends the team, and is its first thread.  The others, its helpers, start at the first run.
// Between two runs they spin on their cores, then yield them, and after some milliseconds sleep.
class OwnTeam : public cl_team {
 public:
  // `cores` has the core of each thread, first that of the lending thread, which is pinned already.  A thread with core
  // -1 runs anywhere, and sleeps at once if it has nothing to do.
  explicit OwnTeam(std::vector<int> cores);
  ~OwnTeam();
  OwnTeam(const OwnTeam&) = delete;
  OwnTeam& operator=(const OwnTeam&) = delete;

 private:
  struct Parts {
    void (*run)(void* argument, int32_t index);
    void* argument;
  };

  // Thread `index` of the team, which does the part with that number.
  struct Helper {
    Helper(int32_t index, int core) : index(index), core(core) {}

    const int32_t index;
    const int core;
    std::atomic<const Parts*> parts{nullptr};  // the current run; null once this helper has done its part
    std::atomic<bool> sleeps{false}, ends{false};
    std::mutex mutex;
    std::condition_variable wake;
    std::thread thread;
  };

  void run_parts(int32_t count, const Parts& parts);
  void start(size_t count);
  static void work(Helper& helper);
  static const Parts* next(Helper& helper);
  static void wake(Helper& helper);

  const std::vector<int> cores_;
  std::list<Helper> helpers_;
};

// Pins the calling thread to a core, if that is allowed.
void pin_this_thread(int core);

}  // namespace cpulaunch
