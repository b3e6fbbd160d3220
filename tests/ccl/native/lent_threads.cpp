#include "lent_threads.hpp"

#include <sched.h>

namespace cpulaunch {

namespace {

// Each thread but the last is pinned to a core, which threads of other ranks share; the last one runs anywhere.
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

std::vector<Moved> LentThreads::moved() {
  std::vector<Moved> moved(team_.size);
  const auto ask = [](void* all, int32_t thread) {
    (*static_cast<std::vector<Moved>*>(all))[thread] = moved_by_this_thread();
  };
  team_.run(&team_, team_.size, ask, &moved);
  moved[0].copied -= before_.copied;
  moved[0].summed -= before_.summed;
  return moved;
}

}  // namespace cpulaunch
