#include "clock.hpp"

#include <atomic>
#include <mutex>

namespace cpulaunch {

namespace {

using Steady = std::chrono::steady_clock;

// A gap of this length counts as a stop.  A busy host may keep all waiting threads from running, but rarely for so
// long; if it does, that counts as a stop, too.
constexpr Clock::duration kStopped = std::chrono::seconds(2);
// `last_asked` is updated once in this time, so that most calls only read it.
constexpr Clock::duration kResolution = std::chrono::milliseconds(10);

std::atomic<Clock::duration> last_asked{Steady::now().time_since_epoch()};
std::atomic<Clock::duration> left_out{Clock::duration::zero()};
std::mutex mutex;  // held to change `left_out`

void note(Clock::duration time) {
  auto last = last_asked.load();
  while (last < time && !last_asked.compare_exchange_weak(last, time)) {
  }
}

}  // namespace

Clock::time_point Clock::now() {
  for (;;) {
    const auto before = left_out.load();
    const auto time = Steady::now().time_since_epoch();
    const auto last = last_asked.load();
    if (time - last > kStopped) {
      std::lock_guard<std::mutex> lock(mutex);
      // Store `left_out` before `last_asked`: a thread that reads the new `last_asked`, and so finds no gap, must also
      // read the new `left_out`.
      if (const auto gap = time - last_asked.load(); gap > kStopped) left_out.store(left_out.load() + gap);
      note(time);
    } else if (left_out.load() == before) {
      if (time - last > kResolution) note(time);
      return time_point(time - before);
    }
  }
}

Steady::time_point Clock::steady(time_point time) {
  return Steady::time_point(time.time_since_epoch() + left_out.load());
}

}  // namespace cpulaunch
