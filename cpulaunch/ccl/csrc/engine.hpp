// Drives the collectives of all groups of the process.
//
// oneCCL is entered by one thread at a time.  A synchronous collective is driven by its caller.  An
// asynchronous one goes to a background thread, after a moment in which small ones complete.  On a rank's
// only core a thread that polls would steal from the computation, so this one naps soon after the
// last poll that has moved data, and a late peer costs next to nothing.

#pragma once

#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>

#include "operation.hpp"

namespace cpulaunch {

struct EngineOptions {
  bool offload = false;        // oneCCL's workers make progress on cores of their own
  bool yield = false;          // more ranks than cores: give up the core between polls
  bool only_core = false;      // of the rank: there is no computing beside driving
  std::vector<int> cores;      // where the background thread runs; empty: anywhere
};

// Nothing destroys the engine: its threads may outlive everything but the process.
class Engine {
 public:
  static Engine& instance();

  void configure(EngineOptions options);
  const EngineOptions& options() const { return options_; }

  // oneCCL is only called with this lock held.
  std::unique_lock<std::mutex> enter() { return std::unique_lock<std::mutex>(oneccl_); }

  // Brings a started operation on its way: completes it when it is synchronous.
  void run(const c10::intrusive_ptr<Operation>& operation, bool asynchronous);

  // Waits some seconds for what is in flight, then ends the background threads and lets nobody into oneCCL
  // any more; for interpreter exit.
  // True when nothing was in flight.
  bool shutdown();
  bool stopped() const { return stopping_.load(std::memory_order_acquire); }

  // Between two polls that saw no progress.  `idle` counts them.
  void pause(unsigned idle) const;

  std::vector<std::string> in_flight();

 private:
  void watch(c10::intrusive_ptr<Operation> operation);
  void lead();
  void background();

  EngineOptions options_;
  std::mutex oneccl_;

  // Leader and followers: one background thread polls; before it completes operations, which may run
  // callbacks that wait for other operations, it hands the lead to another.
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<c10::intrusive_ptr<Operation>> pending_;
  bool led_ = false;
  int idle_threads_ = 0;
  int threads_ = 0;
  std::atomic<bool> stopping_{false};
};

}  // namespace cpulaunch
