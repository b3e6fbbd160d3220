// The threads of communication, where the plan gives a rank several cores for it.
//
// The background thread that drives operations lends them to the core, which gives each an equal part of what it
// copies and sums.  They are not OpenMP's, which would start a further team for each background thread.

#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "interface.h"

namespace cpulaunch {

// One thread lends it at a time, and is itself the first of the team.  The others start when it first runs something.
// Between two runs they spin on their cores, then yield them, and after some milliseconds sleep.
class OwnTeam : public cl_team {
 public:
  // The core of each thread, first that of the one that lends them, which is on it already.  -1: it runs anywhere, and
  // sleeps at once when it has nothing to do.
  explicit OwnTeam(std::vector<int> cores);
  ~OwnTeam();
  OwnTeam(const OwnTeam&) = delete;
  OwnTeam& operator=(const OwnTeam&) = delete;

 private:
  struct Parts {
    void (*run)(void* argument, int32_t index);
    void* argument;
  };

  // Thread `index` of the team, which does the part of that number.
  struct Helper {
    Helper(int32_t index, int core) : index(index), core(core) {}

    const int32_t index;
    const int core;
    std::atomic<const Parts*> parts{nullptr};  // what it is to do a part of; null once it has
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

// Has the calling thread run on this core only, where that is allowed.
void pin_this_thread(int core);

}  // namespace cpulaunch
