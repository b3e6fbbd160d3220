// Counts what collectives among many hosts take, with the real core: rounds, messages, system calls, bytes, descriptors
// and allocations.

#pragma once

#include <cstddef>
#include <vector>

#include "collective.hpp"

namespace cpulaunch {

// A collective on `bytes` of float32 in all: for an all_reduce or a broadcast, the size of the tensor; otherwise, that
// of all ranks' parts of one tensor.  Or messages of this size: ranks send one to each other in pairs.
struct Workload {
  const char* name;
  Kind kind;
  size_t bytes;
  int times;  // how many calls are counted
  bool in_shared_memory = false;  // whether an all_reduce's tensor is there
  bool has_root() const { return kind == Kind::broadcast || kind == Kind::gather || kind == Kind::scatter; }
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
    {"broadcast of 4 KB", Kind::broadcast, 4 << 10, 16},
    {"broadcast of 2 MB", Kind::broadcast, 2 << 20, 2},
    {"gather of 16 KB", Kind::gather, 16 << 10, 16},
    {"scatter of 16 KB", Kind::scatter, 16 << 10, 16},
    {"send of 4 KB", Kind::send, 4 << 10, 16},
    {"send of 1 MB", Kind::send, 1 << 20, 4},
};

// Both print a line for each workload: its name, and `KEY=NUMBER` for one call, where each number is the highest of any
// rank.  print_steps() prints what is the same in every run of a collective, with one rank on each host.
// print_counts() prints what the ranks of these hosts do over existing connections.
void print_steps(const std::vector<int>& host_of);
void print_counts(const std::vector<int>& host_of);

}  // namespace cpulaunch
