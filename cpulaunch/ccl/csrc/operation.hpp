// One collective from its start to its completion, and the group that it belongs to.

#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <oneapi/ccl.hpp>

#include <ATen/ThreadLocalState.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "hostsum.hpp"

namespace cpulaunch {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// What the operations, the engine and the sentinel share of a group; it outlives the group while
// operations are in flight.
class GroupState {
 public:
  GroupState(std::string name, int rank, int size) : name(std::move(name)), rank(rank), size(size) {}

  // After a failure the ranks no longer agree on what comes next: everything after it fails too.
  void fail(const std::string& reason);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string reason() const;

  const std::string name;
  const int rank;
  const int size;
  std::atomic<int> in_flight{0};  // operations started and not completed

 private:
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::string reason_;
};

// A collective in flight.  Whoever waits for it drives it: oneCCL's blocking wait has no time limit.
class Operation : public c10d::Work {
 public:
  Operation(std::shared_ptr<GroupState> group, c10d::OpType type, const char* name, const char* title,
            std::vector<at::Tensor> inputs, uint64_t sequence, Milliseconds timeout);

  // Before the start.
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }
  // Something to do when the data has come.  It runs on the thread that completes the operation, with the
  // thread-local state that the caller has now: grad mode, inference mode, dispatch keys and the like.
  void afterwards(std::function<void()> action);
  void set_outputs(std::vector<at::Tensor> outputs) { outputs_ = std::move(outputs); }
  void started(std::vector<ccl::event> events) {
    events_ = std::move(events);
    uses_oneccl_ = !events_.empty();
  }
  void started(std::shared_ptr<HostSum> sum, uint64_t ticket) {
    host_sum_ = std::move(sum);
    ticket_ = ticket;
  }

  // Looks once whether it is done, and completes it if so.  True when completed (or failed).
  bool poll();
  // As poll(), but leaves the completion, which may run user code, to the caller: true exactly once.
  bool claim();
  void complete();
  void fail(const std::string& what);
  // Polls until completed, or until `until`; false when it is not completed by then.  A step of a sum within
  // the host gives it `more` time from there: the peers are at it too.
  bool drive(Clock::time_point until, Clock::duration more = Clock::duration::zero());
  // Fails the operation if its time is up or its group has failed.
  void check(Clock::time_point now);

  bool running() const { return state_.load(std::memory_order_acquire) == State::running; }
  bool done() const { return state_.load(std::memory_order_acquire) == State::done; }
  Clock::time_point since() const { return since_; }
  const std::shared_ptr<GroupState>& group() const { return group_; }
  std::string describe() const;

  // c10d::Work
  bool isCompleted() override { return poll(); }
  bool isSuccess() const override;
  bool wait(Milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override { fail("was aborted"); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  enum class State { running, claimed, done };

  bool take();
  void finish_with(std::exception_ptr error);

  const std::shared_ptr<GroupState> group_;
  const char* const operation_;
  const std::vector<at::Tensor> inputs_;
  const uint64_t sequence_;
  const Milliseconds timeout_;
  const Clock::time_point since_ = Clock::now();
  std::vector<at::Tensor> kept_;
  std::vector<at::Tensor> outputs_;
  std::vector<std::function<void()>> afterwards_;
  std::optional<at::ThreadLocalState> callers_state_;  // set when there is something to do afterwards
  std::vector<ccl::event> events_;
  std::shared_ptr<HostSum> host_sum_;  // null where nothing goes that way
  uint64_t ticket_ = 0;
  bool uses_oneccl_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<State> state_{State::running};
};

}  // namespace cpulaunch
