// Threads that help the thread that drives operations.
//
// A thread lends the core a team of threads (cl_lend_team in interface.h).  A thread of the program lends its OpenMP
// threads, which have nothing else to do meanwhile.  The background thread lends the threads of communication, if the
// plan gives the rank several.  Each thread of the team does an equal part of the copies and sums of a stage, and may
// drive the connections of a network (network_striped.hpp).  No part waits for another rank.  A thread that has lent no
// team does everything itself.

#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <vector>

#include "arithmetic.hpp"
#include "copy.hpp"
#include "interface.h"

namespace cpulaunch {

class SharedSlots;

// Bytes that a thread has copied since it began, and those that it has read to sum them.
struct Moved {
  uint64_t copied = 0, summed = 0;
};
Moved moved_by_this_thread();

// Sets the team that the calling thread lends from now on; null: none.  Returns the previous one.
const cl_team* lend_team(const cl_team* team);
// Returns the team that the calling thread lends; null: none.
const cl_team* lent_team();
// Calls part(i) for each i below `parts`, each on a thread of the lent team.  `parts` is 1, or at most the team's size.
// Returns an exception that a call has thrown, or null.
std::exception_ptr run_on_team(size_t parts, const std::function<void(size_t)>& part);

// Independent copies and sums.  run() does them on the lent team; without a team, each is done at once.
class Batch {
 public:
  // `to` and `from` are equal, or the ranges don't overlap.
  void copy(char* to, const char* from, size_t bytes, const Copy& how = Copy(0));
  // Adds an operand of the next sum().
  void add(const char* from) { sources_.push_back(from); }
  void sum(Reduce* reduce, char* to, size_t bytes, int divisor);
  // Copies from another local rank's memory.  run() throws std::runtime_error if SharedSlots::read() does.
  void read(const SharedSlots& slots, int local, char* to, uint64_t address, size_t bytes);
  void run();
  // Drops the jobs that have not been done.
  void clear();

 private:
  struct Job {
    char* to;
    const char* from;
    size_t bytes;
    Copy how;
    Reduce* reduce = nullptr;       // null: not a sum
    size_t first = 0, sources = 1;  // the operands of a sum: `sources` items of `sources_`, from `first` on
    int divisor = 1;
    const SharedSlots* slots = nullptr;  // if the job reads the memory of the local rank `local`, at `address`
    int local = 0;
    uint64_t address = 0;

    size_t weight() const { return bytes * (sources + 1); }  // bytes that are read or written
  };

  void add_job(const Job& job);
  void run_part(size_t index, size_t parts) const;
  void run_stretch(const Job& job, size_t begin, size_t end) const;

  std::vector<Job> jobs_;
  std::vector<const char*> sources_;
  size_t summed_ = 0;  // how many of `sources_` belong to jobs
};

}  // namespace cpulaunch
