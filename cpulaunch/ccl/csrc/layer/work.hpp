// One collective operation or message from its start to its completion, and the state of its group.

#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ThreadLocalState.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "cause.hpp"
#include "clock.hpp"
#include "ledger.hpp"
#include "members.hpp"
#include "pace.hpp"
#include "transfer.hpp"

namespace cpulaunch {

using Milliseconds = std::chrono::milliseconds;

// A rank's description of its call, for ranks that have waited for long.
struct CallSummary {
  std::string text;
  std::string must_agree;  // must be equal on all ranks
};

// The numbers in "1, 3".
std::vector<int> numbers_in(const std::string& text);

// The state of a group that its operations, the progress engine and the watchdog share.  It outlives the group while
// operations are in flight.
class GroupState {
 public:
  // `in_ledger` is the text in which the ledger lists the members.
  GroupState(std::string name, int rank, int size, Members members, const std::string& in_ledger, Pace pace)
      : name(std::move(name)),
        rank(rank),
        size(size),
        members(std::move(members)),
        pace(pace),
        ledger("ccl", this->name, rank, size, in_ledger) {}

  // Fails the group.  All later operations fail, too, because the ranks no longer agree on the next call.  Only the
  // first failure is kept.
  void fail(const std::string& reason, const Cause& cause, c10d::ErrorType kind = c10d::ErrorType::COMM_ERROR);
  // The reason is the cause's own text.
  void fail(const Cause& cause) { fail(cause.text(), cause); }
  c10d::ErrorType error() const { return error_.load(std::memory_order_relaxed); }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string reason() const;
  Cause cause() const;

  // Why this rank waits in the operation with this sequence number; empty if unknown.
  void set_delay(uint64_t sequence, const Cause& cause);
  Cause delay(uint64_t sequence) const;
  // The beginning of this rank's errors about `call`: "rank 1: all_reduce of group '0' of 2 ranks".
  std::string describe(const std::string& call) const;
  // A cause about `ranks` of the group, such as "1, 3"; "" if they are unknown.
  Cause about(CauseKind kind, const std::string& ranks) const;

  // Sets a hook that is called for each operation that completes.  Must come before the first operation starts.
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
  void set_hook(Hook hook) { hook_ = std::move(hook); }
  const Hook& hook() const { return hook_; }

  const std::string name;
  const int rank;
  const int size;
  const Members members;
  const Pace pace;
  std::atomic<int> in_flight{0};  // operations started and not completed
  LedgerGroup ledger;

 private:
  std::atomic<bool> failed_{false};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  Hook hook_;
  mutable std::mutex mutex_;
  std::string reason_;
  Cause cause_;
  uint64_t delayed_ = 0;
  Cause delay_;
};

// Returns the cause of the exception with the text `error`; empty if this process hasn't raised it recently.
Cause cause_of(const std::string& error);
// Throws c10d's exception with this text, and keeps the cause for cause_of().
[[noreturn]] void throw_for(const Cause& cause, const std::string& text);

// An operation in flight.  A waiting thread drives it by polling, because no transport has a wait with a time limit.
class CclWork final : public c10d::Work {
 public:
  // `name` is used in error messages, and `profiling_title` in torch's profiler.  `peer` is a message's other rank; -1
  // for a collective.
  CclWork(std::shared_ptr<GroupState> group, c10d::OpType type, const char* name, const char* profiling_title,
          std::vector<at::Tensor> inputs, uint64_t sequence, Milliseconds timeout, int peer);

  // --- before the start

  // Keeps alive a tensor that the transfer reads or writes.
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }
  // Adds an action for when the data has arrived.  Actions run in reverse order, on the thread that completes the
  // operation, with the caller's present thread-local state: grad mode, inference mode, dispatch keys and the like.
  void afterwards(std::function<void()> action);
  void set_outputs(std::vector<at::Tensor> outputs) { outputs_ = std::move(outputs); }
  // Notes the root (or -1) and the name of the reduction (or "") in the ledger.
  void says(int root, const char* reduction = "") { entry_.says(root, reduction); }
  // Returns where a message's transfer is to store the sender's rank.
  int32_t* source(int32_t from) { return &source_.emplace(from); }
  void started(std::unique_ptr<Transfer> transfer) {
    transfer_ = std::move(transfer);
    entry_.start();
  }

  // --- from the start on

  // Tests the transfer once, and completes the operation if the transfer is done.  True if the operation has completed
  // or failed.
  bool poll();
  // Like poll(), but leaves the completion, which may run user code, to the caller: returns true exactly once, and then
  // the caller must call complete().
  bool claim();
  void complete();
  // Fails the operation and its group.  `what` continues the sentence that begins with describe().  `tell`: whether
  // this process lives long enough to report the failure to the other ranks.
  void fail(const std::string& what, Cause cause, bool tell = true,
            c10d::ErrorType kind = c10d::ErrorType::COMM_ERROR);
  // Polls until the operation is complete, or until `until`; returns false in the second case.  Whenever a poll
  // advances the transfer, `until` moves to at least `more` after that poll, because the peers make progress, too.
  bool drive(Clock::time_point until, Clock::duration more = Clock::duration::zero());
  // Fails the operation if its timeout is over or its group has failed.  Alerts the watchdog if it has waited for long.
  void check(Clock::time_point now);
  // Called while the program waits: lets it handle its signals from time to time.  An exception of a signal handler
  // fails the operation and is passed on.
  void handle_signals(Clock::time_point now);

  // See Transfer.
  std::optional<uint64_t> steps() const { return transfer_->steps(); }
  const void* moved_with() const { return transfer_->moved_with(); }
  bool is_message() const;
  const Pace& pace() const { return group_->pace; }
  // Whether a thread in wait() polls this operation.
  bool is_driven() const { return drivers_.load(std::memory_order_relaxed) > 0; }
  bool was_waited_for() const { return waited_for_.load(std::memory_order_relaxed); }
  bool running() const { return state_.load(std::memory_order_acquire) == State::running; }
  bool done() const { return state_.load(std::memory_order_acquire) == State::done; }
  Clock::time_point started_at() const { return started_at_; }
  std::string describe() const;
  const std::vector<at::Tensor>& tensors() const { return inputs_; }

  // --- c10d::Work

  bool isCompleted() override { return poll(); }
  bool isSuccess() const override;
  bool wait(Milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override { fail("was aborted", Cause(CauseKind::aborted)); }
  std::vector<at::Tensor> result() override { return outputs_; }
  float getDuration() const override;  // in milliseconds
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  int sourceRank() const override { return source_ ? *source_ : Work::sourceRank(); }

 private:
  enum class State { running, claimed, done };

  // The part of describe() without rank and group.
  std::string call() const;
  bool poll_until(Clock::time_point until, Clock::duration more);
  // Which message has not been sent or received; empty if this is a collective.
  Cause missing_message() const;
  // Why the operation isn't complete, as far as is known.
  Cause delay() const;
  // Adds this operation to a cause that names no operation.
  Cause own(Cause cause) const;
  // The transport has failed.  The operation fails a little later, so that the other ranks can publish what they call.
  // `explained`: the cause already says how the calls differ.
  void broke(std::string reason, const Cause& cause, bool explained);
  CallSummary summary() const;
  // True for exactly one thread, which may then complete or fail the operation.
  bool wins();
  void finish_with(std::exception_ptr error);
  void call_hook() const;

  const std::shared_ptr<GroupState> group_;
  const char *const name_, *const kind_;
  const std::vector<at::Tensor> inputs_;
  const uint64_t sequence_;
  const Milliseconds timeout_;
  const Clock::time_point started_at_ = Clock::now();
  Clock::time_point ended_at_{};
  LedgerEntry entry_;
  std::atomic<bool> waited_for_{false};
  std::atomic<bool> driven_{false};  // a thread has called drive()
  std::atomic<int> drivers_{0};      // threads in wait(), except those in a signal handler
  std::vector<at::Tensor> kept_;
  std::vector<at::Tensor> outputs_;
  std::optional<int32_t> source_;
  std::vector<std::function<void()>> afterwards_;
  std::optional<at::ThreadLocalState> callers_state_;  // set if `afterwards_` isn't empty
  std::unique_ptr<Transfer> transfer_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<State> state_{State::running};
  std::atomic<bool> breaks_{false};  // true once a thread has begun to set the next four members
  std::string broken_reason_;
  std::unique_ptr<const Cause> broken_cause_;
  bool is_explained_ = false;
  Clock::time_point broken_at_;
  std::atomic<bool> broken_{false};  // the four members above are set
};

}  // namespace cpulaunch
