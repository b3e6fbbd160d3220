// How a thread that polls lets time pass between two polls.

#pragma once

#include <chrono>

namespace cpulaunch {

// What a rank knows about the cores that it runs on.
struct Pace {
  bool crowded = false;       // its host's ranks outnumber the cores: each poll that finds nothing gives up the core
  bool shares_cores = false;  // ranks of other hosts, which this machine simulates, run on the same cores
  int cores = 1;              // how many this rank has if it shares them evenly with the other ranks of its host

  // Combines the paces of several groups, for a thread that polls for all of them.
  void add(const Pace& other) {
    crowded = crowded || other.crowded;
    shares_cores = shares_cores || other.shares_cores;
  }
};

// Whether a thread of a rank with this pace may use helper threads: not if ranks take turns on the cores.
inline bool may_lend(const Pace& pace) { return !pace.crowded && !pace.shares_cores; }

// Tells the processor that this thread waits for memory to change.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

enum class Rest {
  spin,       // keeps the core
  yield,      // lets another thread run if one waits for the core
  nap,        // gives the core up for a moment: the peer is late
  long_nap,   // gives the core up for longer: the peer is computing, and this rank should be able to compute, too
};

// A poller spins at first, because its peer's next piece comes soon.  Then it yields, and finally it naps.
//
//                            spins         yields         then
//   a core of its own        1,000 polls   19,000 polls   naps: some ms have passed
//   cores of other hosts     20 polls      100 us         naps: if simulated hosts share cores, one yield can take
//                                                         Linux 6.18 4 ms, and threads that go on yielding have left
//                                                         others without a core for half a minute
//   crowded                  none          1,000 polls    naps
inline Rest rest_of_poller(const Pace& pace, unsigned idle_polls, std::chrono::nanoseconds yielding) {
  constexpr unsigned kSpins = 1000, kSpinsOfShared = 20, kPolls = 20000, kPollsOfCrowded = 1000;
  constexpr std::chrono::microseconds kYieldTimeOfShared{100};
  const unsigned spins = pace.crowded ? 0 : pace.shares_cores ? kSpinsOfShared : kSpins;
  if (idle_polls < spins) return Rest::spin;
  const bool yields = pace.shares_cores ? yielding < kYieldTimeOfShared
                                        : idle_polls < (pace.crowded ? kPollsOfCrowded : kPolls);
  return yields ? Rest::yield : Rest::nap;
}

// For the background thread.  On its own core, it polls as a caller does.  On other cores, it would take time from the
// computation: it polls until some 50 us after data was last moved, then naps for some ms, and then for longer.  If
// callers drive all pending operations (`leads` is false), it only completes those that are done.
inline Rest rest_in_background(const Pace& pace, bool has_own_core, bool leads, unsigned idle_polls,
                               std::chrono::nanoseconds yielding) {
  constexpr unsigned kPolls = 100, kNaps = 50;
  if (leads && (has_own_core || idle_polls < kPolls)) return rest_of_poller(pace, idle_polls, yielding);
  return leads && idle_polls < kPolls + kNaps ? Rest::nap : Rest::long_nap;
}

}  // namespace cpulaunch
