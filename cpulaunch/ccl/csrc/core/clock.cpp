#include "clock.hpp"

#include <atomic>
#include <mutex>

namespace cpulaunch {

namespace {

using Steady = std::chrono::steady_clock;

// A busy host may keep all threads that wait from running for some time; if it takes longer than this, that counts as
// stopped, too.
constexpr Clock::duration kStopped = std::chrono::seconds(2);
// It is noted once in this time that somebody has asked: most calls only read.
constexpr Clock::duration kResolution = std::chrono::milliseconds(10);

std::atomic<Clock::duration> last_asked{Steady::now().time_since_epoch()};
std::atomic<Clock::duration> left_out{Clock::duration::zero()};
std::mutex mutex;  // of those who leave something out

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
      // First what is left out: whoever reads the new last_asked, and so finds no gap, must read this as well.
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
