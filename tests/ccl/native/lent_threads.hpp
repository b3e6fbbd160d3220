// Threads that a rank's thread lends to the transport, in place of OpenMP's.

#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "team.hpp"

namespace cpulaunch {

// Lent by the thread that makes it, which is the first one of them, for as long as it lives.
class LentThreads : cl_team {
 public:
  explicit LentThreads(int count);
  ~LentThreads();
  LentThreads(const LentThreads&) = delete;
  LentThreads& operator=(const LentThreads&) = delete;

  // What each of them has moved since it was lent.
  std::vector<Moved> moved();

 private:
  using Act = std::function<void(int thread)>;

  // Calls `act` with the number of each thread, in that thread, and returns when all calls have.
  void run_all(const Act& act);
  void work(int thread);

  std::mutex mutex_;
  std::condition_variable changed_;
  const Act* act_ = nullptr;
  int turn_ = 0, working_ = 0;  // how often they were called, and how many have not returned
  bool ends_ = false;
  const Moved before_ = moved_by_this_thread();
  std::vector<std::thread> threads_;
};

}  // namespace cpulaunch
