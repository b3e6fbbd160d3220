#include "progress.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "lent_team.hpp"
#include "own_team.hpp"
#include "watchdog.hpp"

namespace cpulaunch {

namespace {

// How long the caller drives an asynchronous operation, unless communication has its own core: handing a small
// operation over to another thread costs more than completing it.  If the rank has only one core, the time starts again
// with each step.
constexpr auto kInlineDriveTime = std::chrono::microseconds(200);
// For transfers that don't count their steps: if a round of polls computes for longer than this, it has moved data
// (otherwise it takes less than 1 us per operation), so the next round will probably move more.
constexpr auto kIdleRoundTime = std::chrono::microseconds(3);
// The background thread checks timeouts and failed groups once in this many rounds (13 ms while it naps).
constexpr unsigned kRoundsPerCheck = 64;
// The length of a nap, and what the kernel may add to it.
constexpr auto kPollerNap = std::chrono::microseconds(50);
constexpr auto kBackgroundNap = std::chrono::microseconds(20);
constexpr auto kLongNap = std::chrono::microseconds(200);
constexpr unsigned long kTimerSlack = 1000;  // nanoseconds
// When a process ends, its messages and callbacks have this time to complete after its collectives, because a peer may
// be waiting for them (collectives have until their timeouts, unless the process has failed) ...
constexpr auto kShutdownTimeout = std::chrono::seconds(5);
// ... and then its background threads have this time to end.
constexpr auto kThreadsTimeout = std::chrono::seconds(1);

// The CPU time of this thread: unlike the clock, it stands still while other threads have the core.
std::chrono::nanoseconds thread_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

[[noreturn]] void stay() {
  for (;;) ::pause();
}

// During its lifetime, the kernel adds at most kTimerSlack to this thread's naps; by default, it adds as much as a nap
// takes.  Afterwards, the thread has its previous setting, because it belongs to the program.
class ExactTimers {
 public:
  ExactTimers() { prctl(PR_SET_TIMERSLACK, kTimerSlack, 0, 0, 0); }
  ~ExactTimers() { prctl(PR_SET_TIMERSLACK, before_, 0, 0, 0); }
  ExactTimers(const ExactTimers&) = delete;
  ExactTimers& operator=(const ExactTimers&) = delete;

 private:
  const int before_ = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
};

thread_local bool is_background_thread = false;
thread_local int visits = 0;  // nested visits of this thread: callbacks communicate, too

// Whether this thread ends the process.
bool is_main_thread() {
  thread_local const bool is = syscall(SYS_gettid) == getpid();
  return is;
}

}  // namespace

ProgressEngine::Visit::Visit(ProgressEngine& engine, bool in_message)
    : engine_(engine),
      is_watched_(visits++ == 0 && !is_main_thread()),
      counts_(is_watched_ && !in_message),
      may_stay_(is_watched_ && !is_background_thread) {
  if (counts_) ++engine_.visitors_;
  if (!may_stay_ || !engine_.is_ending_) return;
  if (counts_) --engine_.visitors_;
  stay();
}

ProgressEngine::Visit::~Visit() {
  --visits;
  if (counts_) --engine_.visitors_;
  if (may_stay_ && engine_.is_ending_) stay();
}

ProgressEngine& ProgressEngine::instance() {
  static auto* engine = new ProgressEngine;
  return *engine;
}

void ProgressEngine::configure(ProgressOptions options) {
  options_ = std::move(options);
  if (options_.cores.size() > 1) team_ = new OwnTeam(options_.cores);
}

// How long the thread has yielded, if that matters; else 0, because reading the clock takes as long as a poll.
std::chrono::nanoseconds ProgressEngine::yielding(const Idle& idle, const Pace& pace) const {
  if (!pace.shares_cores || idle.yields_since == Clock::time_point{}) return std::chrono::nanoseconds(0);
  return Clock::now() - idle.yields_since;
}

void ProgressEngine::rest(Rest rest, Idle& idle) const {
  if (rest == Rest::spin) {
    relax();
  } else if (rest == Rest::yield) {
    if (idle.yields_since == Clock::time_point{}) idle.yields_since = Clock::now();
    sched_yield();
  } else if (is_background_thread) {
    std::this_thread::sleep_for(rest == Rest::nap ? kBackgroundNap : kLongNap);
  } else {
    const ExactTimers exact;
    std::this_thread::sleep_for(kPollerNap);
  }
}

void ProgressEngine::pause(Idle& idle, const Pace& pace) const {
  rest(rest_of_poller(pace, idle.polls, yielding(idle, pace)), idle);
}

int ProgressEngine::openmp_threads(const Pace& pace) const {
  return may_lend(pace) && !is_background_thread ? pace.cores : 1;
}

void ProgressEngine::run(const c10::intrusive_ptr<CclWork>& work, bool asynchronous) {
  const LentTeam team(openmp_threads(work->pace()));
  if (!asynchronous) {
    work->drive(Clock::time_point::max());
    return;
  }
  if (!options_.has_core) {
    const auto more = options_.only_core ? kInlineDriveTime : Clock::duration::zero();
    if (work->drive(Clock::now() + kInlineDriveTime, more)) return;
  } else if (work->poll()) {
    return;
  }
  watch(work);
}

void ProgressEngine::watch(c10::intrusive_ptr<CclWork> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.push_back(std::move(work));
  if (!led_) promote_follower();
}

// Makes a background thread the leader.  The caller holds the lock.
void ProgressEngine::promote_follower() {
  if (idle_threads_ > 0) {
    wake_.notify_one();
  } else {
    ++threads_;
    std::thread([this] { background(); }).detach();
  }
}

void ProgressEngine::background() {
  pthread_setname_np(pthread_self(), "cpulaunch-ccl");
  prctl(PR_SET_TIMERSLACK, kTimerSlack, 0, 0, 0);
  is_background_thread = true;
  if (!options_.cores.empty()) pin_this_thread(options_.cores[0]);
  while (!stopped()) lead();
  std::lock_guard<std::mutex> lock(mutex_);
  --threads_;
  wake_.notify_all();
}

// Polls the pending operations until some complete, then hands on the lead and completes them.
void ProgressEngine::lead() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++idle_threads_;
  wake_.wait(lock, [&] { return stopped() || (!led_ && !pending_.empty()); });
  --idle_threads_;
  led_ = true;
  std::vector<c10::intrusive_ptr<CclWork>> polled, completed;
  Idle idle;
  uint64_t steps = 0;
  bool counted = true;  // whether all counted their steps in the last round; reading the CPU time takes a system call
  while (completed.empty() && !pending_.empty() && !stopped()) {
    polled.assign(pending_.begin(), pending_.end());
    lock.unlock();  // others may add operations, and check() may run callbacks
    const auto before = Clock::now();
    const bool times = !counted;
    const auto busy = times ? thread_time() : std::chrono::nanoseconds(0);
    // If two threads polled them, they would take turns at the same memory and sockets.
    std::set<const void*> driven;
    for (const auto& work : polled) {
      if (work->is_driven()) driven.insert(work->moved_with());
    }
    uint64_t steps_now = 0;
    bool leads = false;
    Pace pace;
    counted = true;
    for (const auto& work : polled) {
      if (work->is_driven()) continue;
      const LentTeam team(may_lend(work->pace()) ? team_ : nullptr);
      if (work->claim()) completed.push_back(work);
      if (driven.count(work->moved_with())) continue;
      leads = true;
      pace.add(work->pace());
      const auto its_steps = work->steps();
      steps_now += its_steps.value_or(0);
      counted = counted && its_steps;
    }
    const bool moved = counted ? steps_now != steps : !times || thread_time() - busy > kIdleRoundTime;
    steps = steps_now;
    idle.count(moved);
    if (completed.empty()) {
      if (idle.polls % kRoundsPerCheck == 0) {
        for (const auto& work : polled) work->check(before);
      }
      rest(rest_in_background(pace, !options_.cores.empty(), leads, idle.polls, yielding(idle, pace)), idle);
    }
    lock.lock();
    pending_.remove_if([](const auto& work) { return !work->running(); });
  }
  led_ = false;
  if (!pending_.empty() && !stopped()) promote_follower();
  ++completing_threads_;
  lock.unlock();
  for (auto& work : completed) work->complete();
  --completing_threads_;
}

bool ProgressEngine::shutdown(bool has_failed) {
  Watchdog::instance().linger();
  is_ending_ = true;
  // Give operations time to complete, because peers may be waiting for what this rank has started.
  for (auto until = Clock::now() + kShutdownTimeout;;) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_collective = [](const auto& work) { return !work->is_message(); };
    const bool in_collective = visitors_ > 0 || std::any_of(pending_.begin(), pending_.end(), is_collective);
    if (!in_collective && completing_threads_ == 0 && pending_.empty()) break;
    if (in_collective && !has_failed) until = Clock::now() + kShutdownTimeout;
    if (Clock::now() >= until) break;
    lock.unlock();
    try {
      handle_signals();
    } catch (const std::exception&) {
      has_failed = true;  // Ctrl-C, for instance
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  stopping_.store(true, std::memory_order_release);
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.notify_all();
  // A thread inside a user's callback may remain: it no longer makes progress on operations.
  wake_.wait_for(lock, kThreadsTimeout, [&] { return threads_ == 0; });
  return pending_.empty();
}

std::vector<std::string> ProgressEngine::in_flight() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> descriptions;
  for (const auto& work : pending_) {
    const auto ms = std::chrono::duration_cast<Milliseconds>(Clock::now() - work->started_at()).count();
    descriptions.push_back(c10::str(work->describe(), ", for ", ms / 1e3, " s"));
  }
  return descriptions;
}

}  // namespace cpulaunch
