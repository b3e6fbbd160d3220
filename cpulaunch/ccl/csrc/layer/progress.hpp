// Drives the operations of all groups of the process.
//
// The caller of a synchronous operation drives it.  An asynchronous operation is driven by its caller for a moment,
// in which small ones complete, and then by a background thread.  On a rank's only core a thread that polls would
// steal from the computation, so the background thread sleeps between polls soon after the last one that has moved
// data: a late peer costs next to nothing.  A caller that waits for one operation moves the data of all of its group;
// meanwhile the background thread only completes them.

#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

#include "pace.hpp"
#include "work.hpp"

namespace cpulaunch {

class OwnTeam;

struct ProgressOptions {
  bool has_core = false;   // communication has cores of its own: the background thread's, or those of oneCCL's workers
  bool only_core = false;  // the rank has one core, so nothing is computed while its caller drives
  std::vector<int> cores;  // those of communication alone: one thread on each; empty: a thread that runs anywhere
};

// What a thread that polls knows of its polls in vain.
struct Idle {
  void count(bool moved) {
    if (moved) {
      *this = {};
    } else {
      ++polls;
    }
  }

  unsigned polls = 0;                // since the last one that has moved data
  Clock::time_point yields_since{};  // when the first of them was that didn't spin
};

// Nothing destroys the engine: its threads may outlive everything but the process.
class ProgressEngine {
 public:
  static ProgressEngine& instance();

  void configure(ProgressOptions options);
  const ProgressOptions& options() const { return options_; }

  // `handle` runs the program's signal handlers, where its caller is the thread that does, and throws what they throw.
  void set_signal_handling(std::function<void()> handle) { handle_signals_ = std::move(handle); }
  void handle_signals() const {
    if (handle_signals_) handle_signals_();
  }

  // A thread holds a Visit while it is in an operation.  Once the process is ending, other threads of the program can't
  // start an operation, and the destructor of their current Visit blocks forever.  Otherwise they would return to the
  // finalized interpreter, where Python ends a thread by unwinding its stack, which crashes in destructors.  Background
  // threads, which run callbacks, go on until the engine stops.
  class Visit {
   public:
    Visit(ProgressEngine& engine, bool in_message);
    ~Visit();
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    ProgressEngine& engine_;
    const bool is_watched_, counts_, may_stay_;
  };

  // Brings a started operation on its way: completes it when it is synchronous.
  void run(const c10::intrusive_ptr<CclWork>& work, bool asynchronous);
  // Leaves a started operation to a background thread.
  void watch(c10::intrusive_ptr<CclWork> work);

  // For interpreter exit: waits for the collectives in flight, and up to some seconds for messages and callbacks (for a
  // message that another thread of the program waits for, not at all), and for all if the program `has_failed`; then
  // ends the background threads.  From then on no operation makes progress.  True when nothing was in flight any more.
  bool shutdown(bool has_failed);
  bool stopped() const { return stopping_.load(std::memory_order_acquire); }

  // How many threads of its OpenMP team the calling thread has while it moves data, with itself.  One where other ranks
  // need the cores, and in a background thread, which would start a team of its own.
  int openmp_threads(const Pace& pace) const;

  // Lets time pass between two polls.
  void pause(Idle& idle, const Pace& pace) const;

  // One line for each operation that the background thread drives.
  std::vector<std::string> in_flight();

 private:
  void rest(Rest rest, Idle& idle) const;
  std::chrono::nanoseconds yielding(const Idle& idle, const Pace& pace) const;
  void lead();
  void background();
  void promote_follower();

  ProgressOptions options_;
  OwnTeam* team_ = nullptr;  // where communication has several cores; the thread that leads lends it
  std::function<void()> handle_signals_;

  // Leader and followers: one background thread polls.  Before it completes operations, which may run callbacks
  // that wait for other operations, it hands the lead to another thread.
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<c10::intrusive_ptr<CclWork>> pending_;
  bool led_ = false;
  int idle_threads_ = 0;
  int threads_ = 0;
  std::atomic<int> visitors_{0};  // threads in collectives, but for the one that ends the process
  std::atomic<int> completing_threads_{0};
  std::atomic<bool> is_ending_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace cpulaunch
