// Lends the core threads that help the calling thread (team.hpp).

#pragma once

#include "interface.h"

namespace cpulaunch {

// The calling thread lends a team while this object lives.
class LentTeam {
 public:
  // Lends up to `most` threads of the calling thread's OpenMP team, with which torch computes.
  explicit LentTeam(int most);
  // Lends this team; null: none.
  explicit LentTeam(const cl_team* team);
  ~LentTeam();
  LentTeam(const LentTeam&) = delete;
  LentTeam& operator=(const LentTeam&) = delete;

 private:
  const cl_team team_;
  const cl_team* const before_;
};

}  // namespace cpulaunch
