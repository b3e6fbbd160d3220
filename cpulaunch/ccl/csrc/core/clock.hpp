// The time by which this process measures how long it has waited.

#pragma once

#include <chrono>

namespace cpulaunch {

// The steady clock, without the stretches in which this process was stopped: by a batch system that suspends a job, by
// Ctrl-Z, by a debugger.  What ought to happen within some time can't while nobody runs.
//
// A stretch in which nobody has asked for the time is taken for one.  Whoever waits asks every few milliseconds; and
// where nobody waits, nobody misses the time that is left out.
class Clock {
 public:
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;

  static time_point now();
  // What the steady clock showed then.
  static std::chrono::steady_clock::time_point steady(time_point time);
};

}  // namespace cpulaunch
