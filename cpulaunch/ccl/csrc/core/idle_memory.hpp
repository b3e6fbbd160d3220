// Memory of groups that are idle.  A program may make many groups and use few at a time; so a group that starts an
// operation has those give back their memory that have started none for a while.

#pragma once

#include <chrono>
#include <cstddef>

namespace cpulaunch {

class IdleMemory {
 public:
  using Time = std::chrono::nanoseconds;  // of the machine's clock that only goes forward
  // After which a group counts as idle.  Its next operation has the kernel clear new pages, 0.5 ms or more for each MB
  // on a Xeon: so this is long.
  static constexpr std::chrono::seconds kAfter{10};

  static Time now();

  IdleMemory() = default;
  IdleMemory(const IdleMemory&) = delete;
  IdleMemory& operator=(const IdleMemory&) = delete;

  // Gives back what the group doesn't need until its next operation, if it has started none for kAfter.  Any thread
  // may call this.  Returns how many bytes it was.
  virtual size_t give_back(Time now) = 0;

 protected:
  ~IdleMemory() = default;
  // From here on others may have this group give back memory, up to leave(), which comes before its destructor.
  void join();
  void leave();
  // Has them do so, about once a second at most.  For who holds no lock.
  static void look_after_others();
};

}  // namespace cpulaunch
