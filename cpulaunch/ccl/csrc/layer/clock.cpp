// Implements Clock with the core's clock, so that all libraries of the process leave out the same stretches of time.

#include "clock.hpp"

#include "interface.h"

namespace cpulaunch {

Clock::time_point Clock::now() { return time_point(duration(cl_clock_now())); }

std::chrono::steady_clock::time_point Clock::steady(time_point time) {
  return std::chrono::steady_clock::time_point(duration(cl_clock_steady(time.time_since_epoch().count())));
}

}  // namespace cpulaunch
