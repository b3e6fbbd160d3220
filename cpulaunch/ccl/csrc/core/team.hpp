// Copies and sums, in which the thread that drives operations is helped by those that it lends.
//
// A thread of the program that moves data has no use for its OpenMP threads meanwhile, which are as many as its rank
// has cores.  It lends them (cl_lend_team in interface.h), and each of them does an equal part of what a stage of an
// operation copies and sums.  Nothing that they do waits for another rank.  Where nobody lends any, as in a background
// thread, which would get a team of its own, the thread does all by itself.

#pragma once

#include <cstddef>
#include <cstdint>
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

// From now on the calling thread lends these; null: none.  Returns those that it lent before.
const cl_team* lend_team(const cl_team* team);

// Copies and sums of which none depends on another one.  They are done when run() returns; where the thread lends no
// others, each is done at once.
class Batch {
 public:
  // The two are the same, or don't overlap.
  void copy(char* to, const char* from, size_t bytes, const Copy& how = Copy(0));
  // What the sum() that comes next adds up, in this order.
  void add(const char* from) { sources_.push_back(from); }
  void sum(Reduce* reduce, char* to, size_t bytes, int divisor);
  // Copies what another local rank has in its memory.  run() throws std::runtime_error as SharedSlots::read() does.
  void read(const SharedSlots& slots, int local, char* to, uint64_t address, size_t bytes);
  void run();
  // Forgets what has not been done.
  void clear();

 private:
  struct Job {
    char* to;
    const char* from;
    size_t bytes;
    Copy how;
    Reduce* reduce = nullptr;       // of a sum,
    size_t first = 0, sources = 1;  // which adds up this many of `sources_`, from that one on
    int divisor = 1;
    const SharedSlots* slots = nullptr;  // of another rank's memory
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
