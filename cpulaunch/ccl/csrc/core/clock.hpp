// The clock by which this process measures how long it has waited.

#pragma once

#include <chrono>

namespace cpulaunch {

// The steady clock without the time during which this process was stopped: by a batch system that suspends a job, by
// Ctrl-Z, or by a debugger.  So timeouts count only the time in which the process could run.
//
// The clock recognizes a stop by a gap in which no thread has asked for the time.  Threads that wait ask every few
// milliseconds.  While no thread waits, gaps are left out, too, but then no thread measures time.
class Clock {
 public:
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;

  static time_point now();
  // Converts a time to that of the steady clock.  Exact if the process was not stopped since.
  static std::chrono::steady_clock::time_point steady(time_point time);
};

}  // namespace cpulaunch
