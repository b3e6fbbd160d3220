// A team that a rank's thread lends to the core, as the background thread lends the threads of communication.

#pragma once

#include <vector>

#include "meeting.hpp"
#include "own_team.hpp"
#include "team.hpp"

namespace cpulaunch {

// The thread that makes the object lends the team, and is its first thread, while the object lives.
class LentThreads {
 public:
  explicit LentThreads(int count);
  ~LentThreads();
  LentThreads(const LentThreads&) = delete;
  LentThreads& operator=(const LentThreads&) = delete;

  // Returns what each thread has moved since the object was made.
  std::vector<Moved> moved();
  // Returns the system calls of each thread since it started.
  std::vector<Counts> counts();

 private:
  OwnTeam team_;
  const Moved before_ = moved_by_this_thread();
};

}  // namespace cpulaunch
