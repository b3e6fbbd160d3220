// Gives back the memory of idle groups.  A program may make many groups and use only a few at a time.  When a group
// starts an operation, groups that have not started one for a while give back memory.

#pragma once

#include <chrono>
#include <cstddef>

namespace cpulaunch {

class IdleMemory {
 public:
  using Time = std::chrono::nanoseconds;  // of the machine's monotonic clock
  // A group counts as idle after this time.  It is long because the group's next operation makes the kernel clear new
  // pages, which takes 0.5 ms or more per MB on a Xeon.
  static constexpr std::chrono::seconds kAfter{10};

  static Time now();

  IdleMemory() = default;
  IdleMemory(const IdleMemory&) = delete;
  IdleMemory& operator=(const IdleMemory&) = delete;

  // If the group has started no operation for kAfter, gives back the memory that it doesn't need until the next one.
  // Returns the number of bytes.  Any thread may call this.
  virtual size_t give_back(Time now) = 0;

 protected:
  ~IdleMemory() = default;
  // Between join() and leave(), other groups may call give_back().  leave() must come before the destructor.
  void join();
  void leave();
  // Calls give_back() of all groups, about once a second at most.  The caller must not hold a lock.
  static void look_after_others();
};

}  // namespace cpulaunch
