#include "lent_threads.hpp"

#include <sched.h>

namespace cpulaunch {

namespace {

// The last thread runs anywhere, and the others on cores that other ranks' threads have, too.
std::vector<int> cores_for(int count) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  std::vector<int> cores;
  for (int core = 0; static_cast<int>(cores.size()) + 1 < count; core = (core + 1) % CPU_SETSIZE) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  cores.push_back(-1);
  return cores;
}

}  // namespace

LentThreads::LentThreads(int count) : team_(cores_for(count)) { lend_team(&team_); }

LentThreads::~LentThreads() { lend_team(nullptr); }

std::vector<Counts> LentThreads::counts() {
  std::vector<Counts> counts(team_.size);
  run_on_team(team_.size, [&](size_t thread) { counts[thread] = counts_of_this_thread(); });
  return counts;
}

std::vector<Moved> LentThreads::moved() {
  std::vector<Moved> moved(team_.size);
  run_on_team(team_.size, [&](size_t thread) { moved[thread] = moved_by_this_thread(); });
  moved[0].copied -= before_.copied;
  moved[0].summed -= before_.summed;
  return moved;
}

}  // namespace cpulaunch
