// Drives the operations of all groups of the process.
//
// A synchronous operation is driven by its caller.  An asynchronous operation is driven by its caller for a moment, in
// which small operations complete, and then by a background thread.  If the rank has only one core, a polling thread
// would take time from the computation.  So the background thread begins to sleep between its polls soon after data was
// last moved, and waiting for a late peer costs next to nothing.  A caller that waits for one operation moves the data
// of all operations of its group; meanwhile, the background thread only completes them.

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
  bool has_core = false;   // communication has its own cores: the background thread's, or those of oneCCL's workers
  bool only_core = false;  // the rank has one core, so nothing is computed while its caller drives
  std::vector<int> cores;  // used for communication only, by one thread each; if empty, one thread runs anywhere
};

// A polling thread's record of its polls that found nothing.
struct Idle {
  void count(bool moved) {
    if (moved) {
      *this = {};
    } else {
      ++polls;
    }
  }

  unsigned polls = 0;                // since the last poll that moved data
  Clock::time_point yields_since{};  // when the thread first yielded instead of spinning
};

// The engine is never destroyed: its threads may outlive everything but the process.
class ProgressEngine {
 public:
  static ProgressEngine& instance();

  void configure(ProgressOptions options);
  const ProgressOptions& options() const { return options_; }

  // `handle` runs the program's signal handlers if it is called in the thread that handles signals; it passes on their
  // exceptions.
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

  // Drives a started operation: a synchronous one until it is complete.
  void run(const c10::intrusive_ptr<CclWork>& work, bool asynchronous);
  // Leaves a started operation to a background thread.
  void watch(c10::intrusive_ptr<CclWork> work);

  // For interpreter exit.  Waits for the collectives in flight, and up to some seconds for messages and callbacks (not
  // for a message that another thread of the program waits for).  If the program `has_failed`, it waits only some
  // seconds for collectives, too.  Then it ends the background threads; from then on, no operation makes progress.
  // Returns true if nothing was in flight any more.
  bool shutdown(bool has_failed);
  bool stopped() const { return stopping_.load(std::memory_order_acquire); }

  // How many threads of its OpenMP team, including itself, the calling thread uses to move data.  Only one if other
  // ranks need the cores, or in a background thread, for which OpenMP would start a new team.
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
  OwnTeam* team_ = nullptr;  // set if communication has several cores; the leading thread lends it
  std::function<void()> handle_signals_;

  // There are a leader and followers: only the leader polls.  Before it completes operations, which may run callbacks
  // that wait for other operations, it makes another thread the leader.
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<c10::intrusive_ptr<CclWork>> pending_;
  bool led_ = false;
  int idle_threads_ = 0;
  int threads_ = 0;
  std::atomic<int> visitors_{0};  // threads in collectives, except the one that ends the process
  std::atomic<int> completing_threads_{0};
  std::atomic<bool> is_ending_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace cpulaunch
