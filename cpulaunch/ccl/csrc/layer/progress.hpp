// Drives the operations of all groups of the process.
//
// The caller of a synchronous operation drives it.  The caller of an asynchronous operation drives it for a moment, in
// which small ones complete; then a background thread does.  On a rank's only core, a polling thread would take time
// from the computation.  There, the background thread sleeps between polls as soon as no more data moves, so a late
// peer costs next to nothing.  A caller that waits for one operation moves the data of all operations of its group, and
// the background thread only completes them.

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
  bool has_core = false;   // communication has cores of its own, for the background thread or oneCCL's workers
  bool only_core = false;  // the rank has one core, so nothing is computed while its caller drives
  std::vector<int> cores;  // cores for communication alone, with a thread on each; empty: one thread that runs anywhere
};

// How long a thread has polled in vain.
struct Idle {
  void count(bool moved) {
    if (moved) {
      *this = {};
    } else {
      ++polls;
    }
  }

  unsigned polls = 0;                // since a poll has moved data
  Clock::time_point yields_since{};  // when the thread yielded for the first time since then
};

// The engine is never destroyed: its threads may run until the process ends.
class ProgressEngine {
 public:
  static ProgressEngine& instance();

  void configure(ProgressOptions options);
  const ProgressOptions& options() const { return options_; }

  // `handle` runs the program's signal handlers if it is called by the main thread, and throws their exceptions.
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

  // Drives a started operation: until it is complete if it is synchronous, else for a moment.
  void run(const c10::intrusive_ptr<CclWork>& work, bool asynchronous);
  // Hands a started operation to a background thread.
  void watch(c10::intrusive_ptr<CclWork> work);

  // Called when the interpreter exits.  Waits for the collectives in flight, and some seconds for messages and
  // callbacks, but not for messages that another thread waits for.  If the program `has_failed`, waits some seconds for
  // collectives, too.  Then ends the background threads, so no operation makes progress any more.  Returns whether all
  // operations are complete.
  bool shutdown(bool has_failed);
  bool stopped() const { return stopping_.load(std::memory_order_acquire); }

  // Returns how many OpenMP threads the calling thread may use to move data, including itself.  1 if other ranks need
  // the cores, and in a background thread, for which OpenMP would start another team.
  int openmp_threads(const Pace& pace) const;

  // Spins, yields or sleeps between two polls.
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
  OwnTeam* team_ = nullptr;  // if communication has several cores; the leading thread lends it
  std::function<void()> handle_signals_;

  // There are a leader and followers: only the leader polls.  Before it completes operations, which may run callbacks
  // that wait for other operations, it makes another thread the leader.
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<c10::intrusive_ptr<CclWork>> pending_;
  bool led_ = false;
  int idle_threads_ = 0;
  int threads_ = 0;
  std::atomic<int> visitors_{0};  // threads in collectives, except the main thread
  std::atomic<int> completing_threads_{0};
  std::atomic<bool> is_ending_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace cpulaunch
