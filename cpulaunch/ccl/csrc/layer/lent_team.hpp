// The threads that a thread of the program lends to the core: OpenMP's, with which torch computes.

#pragma once

#include "interface.h"

namespace cpulaunch {

// While it lives, the calling thread lends its OpenMP team, where it `lends` and has one.
class LentTeam {
 public:
  explicit LentTeam(bool lends);
  ~LentTeam();
  LentTeam(const LentTeam&) = delete;
  LentTeam& operator=(const LentTeam&) = delete;

 private:
  const cl_team team_;
  const cl_team* const before_;
};

}  // namespace cpulaunch
