// Threads that a rank's thread lends to the transport, as the background thread lends its communication threads.

#pragma once

#include <vector>

#include "own_team.hpp"
#include "team.hpp"

namespace cpulaunch {

// During its lifetime, lends threads of the thread that makes it, which is the first of them.
class LentThreads {
 public:
  explicit LentThreads(int count);
  ~LentThreads();
  LentThreads(const LentThreads&) = delete;
  LentThreads& operator=(const LentThreads&) = delete;

  // What each thread has moved since it was lent.
  std::vector<Moved> moved();

 private:
  OwnTeam team_;
  const Moved before_ = moved_by_this_thread();
};

}  // namespace cpulaunch
