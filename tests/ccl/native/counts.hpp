// Counts what collectives take among many hosts, with the real core: rounds, messages, calls of the kernel, bytes,
// descriptors and allocations.

#pragma once

#include <cstddef>
#include <vector>

#include "collective.hpp"

namespace cpulaunch {

// A collective on `bytes` of float32 in all: of the tensor of an all_reduce, and of all ranks' parts of one tensor
// otherwise.
struct Workload {
  const char* name;
  Kind kind;
  size_t bytes;
  int times;  // how often it is called to be counted
  bool in_shared_memory = false;  // the tensor of an all_reduce
};
constexpr Workload kWorkloads[] = {
    {"barrier", Kind::barrier, 0, 16},
    {"all_reduce of 4 KB", Kind::all_reduce, 4 << 10, 16},
    {"all_reduce of 1 MB", Kind::all_reduce, 1 << 20, 4},
    {"all_reduce of 25 MB", Kind::all_reduce, 25 << 20, 1},
    {"all_reduce of 25 MB in shared memory", Kind::all_reduce, 25 << 20, 1, true},
    {"all_gather of 4 KB", Kind::all_gather, 4 << 10, 16},
    {"reduce_scatter of 4 KB", Kind::reduce_scatter, 4 << 10, 16},
    {"reduce_scatter of 4 MB", Kind::reduce_scatter, 4 << 20, 2},
    {"all_to_all of 16 KB", Kind::all_to_all, 16 << 10, 16},
};

// Both print a line for each of these: its name, and `KEY=NUMBER` for one call, where each number is the most of any
// rank.  What takes the same in each run, with one rank on each host; and what the ranks of a host do over connections
// that are there already.
void print_steps(const std::vector<int>& host_of);
void print_counts(const std::vector<int>& host_of);

}  // namespace cpulaunch
