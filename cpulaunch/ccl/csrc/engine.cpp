#include "engine.hpp"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>

namespace cpulaunch {

namespace {

// How long an asynchronous collective is driven by its caller, where oneCCL has no core of its own, from its
// start; on a rank's only core also from the last step of a sum within the host.
constexpr auto kInline = std::chrono::microseconds(200);
// A poll that computes longer has moved data, so the next one probably will too.
constexpr auto kProgress = std::chrono::microseconds(3);
// After a poll that moved data the background thread polls on for so many (some 50 us), as the peer is at it
// too and its next piece comes soon ...
constexpr unsigned kLinger = 100;
// ... and then naps between polls.
constexpr auto kShortNap = std::chrono::microseconds(20);
constexpr auto kLongNap = std::chrono::microseconds(200);
constexpr unsigned kShortNaps = 50;
// How long a process that ends lets its collectives be completed.
constexpr auto kFarewell = std::chrono::seconds(5);
constexpr unsigned kRoundsPerCheck = 64;
// A driving caller spins; after this many polls it lets others have the core in between, whoever they are ...
constexpr unsigned kPolitely = 1000;
// ... and after so many (some ms) it naps as well: its peer is really late.
constexpr unsigned kSpins = 20000;
constexpr auto kCallersNap = std::chrono::microseconds(30);

// How long this thread has computed: unlike the clock, not while others have the core.
std::chrono::nanoseconds thread_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace

Engine& Engine::instance() {
  static auto* engine = new Engine;
  return *engine;
}

void Engine::configure(EngineOptions options) { options_ = std::move(options); }

void Engine::pause(unsigned idle) const {
  if (!options_.yield && idle < kPolitely) {
    _mm_pause();
  } else if (options_.yield || idle < kSpins) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(kCallersNap);
  }
}

void Engine::run(const c10::intrusive_ptr<Operation>& operation, bool asynchronous) {
  if (!asynchronous) {
    operation->drive(Clock::time_point::max());
    return;
  }
  if (!options_.offload) {
    if (operation->drive(Clock::now() + kInline, options_.only_core ? kInline : Clock::duration::zero())) return;
  } else if (operation->poll()) {
    return;
  }
  watch(operation);
}

void Engine::watch(c10::intrusive_ptr<Operation> operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.push_back(std::move(operation));
  if (led_) return;
  if (idle_threads_ > 0) {
    wake_.notify_one();
  } else {
    ++threads_;
    std::thread([this] { background(); }).detach();
  }
}

void Engine::background() {
  pthread_setname_np(pthread_self(), "cpulaunch-ccl");
  if (!options_.cores.empty()) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int core : options_.cores) CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // where that is not allowed: anywhere
  }
  while (!stopped()) lead();
  std::lock_guard<std::mutex> lock(mutex_);
  --threads_;
  wake_.notify_all();
}

// Polls what is pending until something completes, then hands the lead on and completes it.
void Engine::lead() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++idle_threads_;
  wake_.wait(lock, [&] { return stopped() || (!led_ && !pending_.empty()); });
  --idle_threads_;
  led_ = true;
  std::vector<c10::intrusive_ptr<Operation>> polled, completed;
  unsigned idle = 0;
  while (completed.empty() && !pending_.empty() && !stopped()) {
    polled.assign(pending_.begin(), pending_.end());
    lock.unlock();  // others are to add theirs, and check() may run callbacks
    const auto before = Clock::now();
    const auto busy = thread_time();
    for (const auto& operation : polled) {
      if (operation->claim()) completed.push_back(operation);
    }
    idle = thread_time() - busy > kProgress ? 0 : idle + 1;
    if (completed.empty()) {
      if (idle % kRoundsPerCheck == 0) {
        for (const auto& operation : polled) operation->check(before);
      }
      if (idle < kLinger) {
        pause(idle);
      } else {
        std::this_thread::sleep_for(idle < kLinger + kShortNaps ? kShortNap : kLongNap);
      }
    }
    lock.lock();
    pending_.remove_if([](const auto& operation) { return !operation->running(); });
  }
  led_ = false;
  if (!pending_.empty() && !stopped()) {
    if (idle_threads_ > 0) {
      wake_.notify_one();
    } else {
      ++threads_;
      std::thread([this] { background(); }).detach();
    }
  }
  lock.unlock();
  for (auto& operation : completed) operation->complete();
}

bool Engine::shutdown() {
  // A peer may be waiting for what this rank has started, and will not be if it is gone.
  for (const auto until = Clock::now() + kFarewell; Clock::now() < until;) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (pending_.empty()) break;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  stopping_.store(true, std::memory_order_release);
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.notify_all();
  // A thread inside a user's callback is not waited for: it cannot enter oneCCL any more.
  wake_.wait_for(lock, std::chrono::seconds(1), [&] { return threads_ == 0; });
  return pending_.empty();
}

std::vector<std::string> Engine::in_flight() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> descriptions;
  for (const auto& operation : pending_) {
    const auto ms = std::chrono::duration_cast<Milliseconds>(Clock::now() - operation->since()).count();
    descriptions.push_back(c10::str(operation->describe(), ", for ", ms / 1e3, " s"));
  }
  return descriptions;
}

}  // namespace cpulaunch
