// The programs that `ranks` runs, and what they have in common.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "meeting.hpp"
#include "rank.hpp"

namespace cpulaunch {

constexpr std::chrono::seconds kLimit{30};  // for one operation
constexpr int kMostAtOnce = 4;              // operations

struct Arguments {
  std::vector<int> host_of;
  int rounds;
  uint64_t seed;
};

// A program of this name throws std::exception if something is wrong.
struct Program {
  const char* name;
  void (*run)(const Arguments&);
};
const std::vector<Program>& failing_programs();

// Calls `act` for each rank in a thread of its own.  Throws std::runtime_error with all errors that it has thrown.
void run_ranks(int ranks, const std::function<void(int)>& act);
// Runs random collectives: the ranks draw the same calls from `shared`, and each carries them out in its own way.
void run_rounds(Meeting& meeting, int rank, int rounds, std::mt19937_64 shared);

}  // namespace cpulaunch
