// The threads that a thread lends to the core.

#pragma once

#include "interface.h"

namespace cpulaunch {

// What the calling thread lends while this lives.
class LentTeam {
 public:
  // Up to `most` threads of its OpenMP team, with which torch computes, if it has one.
  explicit LentTeam(int most);
  // That team; null: none.
  explicit LentTeam(const cl_team* team);
  ~LentTeam();
  LentTeam(const LentTeam&) = delete;
  LentTeam& operator=(const LentTeam&) = delete;

 private:
  const cl_team team_;
  const cl_team* const before_;
};

}  // namespace cpulaunch
