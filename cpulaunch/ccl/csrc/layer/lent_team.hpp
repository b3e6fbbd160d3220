// Lends threads of the caller to the core.

#pragma once

#include "interface.h"

namespace cpulaunch {

// Lends threads of the calling thread during its own lifetime.
class LentTeam {
 public:
  // Lends up to `most` threads of the caller's OpenMP team, with which torch computes, if it has a team.
  explicit LentTeam(int most);
  // Lends this team; null: no threads.
  explicit LentTeam(const cl_team* team);
  ~LentTeam();
  LentTeam(const LentTeam&) = delete;
  LentTeam& operator=(const LentTeam&) = delete;

 private:
  const cl_team team_;
  const cl_team* const before_;
};

}  // namespace cpulaunch
