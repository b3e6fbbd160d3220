// One collective operation from its start to its completion, and the group that it belongs to.

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

// What a rank calls, as others learn it where they wait in vain.
struct Said {
  std::string text;
  std::string must_agree;  // the part of it that has to be the same in all ranks
};

// The numbers in "1, 3".
std::vector<int> numbers_in(const std::string& text);

// What the operations, the progress engine and the watchdog share of a group; it outlives the group while
// operations are in flight.
class GroupState {
 public:
  // `in_ledger` is how the ledger has the members' numbers.
  GroupState(std::string name, int rank, int size, Members members, const std::string& in_ledger, Pace pace)
      : name(std::move(name)),
        rank(rank),
        size(size),
        members(std::move(members)),
        pace(pace),
        ledger("ccl", this->name, rank, size, in_ledger) {}

  // After a failure the ranks no longer agree on what comes next: everything after it fails too.  The first one counts.
  void fail(const std::string& reason, const Cause& cause, c10d::ErrorType kind = c10d::ErrorType::COMM_ERROR);
  // For one whose cause says it all.
  void fail(const Cause& cause) { fail(cause.text(), cause); }
  c10d::ErrorType error() const { return error_.load(std::memory_order_relaxed); }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string reason() const;
  Cause cause() const;

  // What has kept this rank waiting in the operation with this sequence number; empty where nobody has found out.
  void set_delay(uint64_t sequence, const Cause& cause);
  Cause delay(uint64_t sequence) const;
  // How an error begins that this rank raises about `call`: "rank 1: all_reduce of group '0' of 2 ranks".
  std::string describe(const std::string& call) const;
  // About ranks of the group, such as "1, 3", or "" where they aren't known.
  Cause about(CauseKind kind, const std::string& ranks) const;

  // What learns of each operation that completes; before the first one starts.
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

// What `error`, the text of an exception, was raised for; empty where it is none of the last ones of this process.
Cause cause_of(const std::string& error);
// Throws c10d's exception with this text, of which cause_of() knows the cause then.
[[noreturn]] void throw_for(const Cause& cause, const std::string& text);

// An operation in flight.  A thread that waits for it drives it, because no transport has a wait with a time limit.
class CclWork final : public c10d::Work {
 public:
  // `name` is for messages, `profiling_title` for torch's profiler; `peer` is a message's other rank, else -1.
  CclWork(std::shared_ptr<GroupState> group, c10d::OpType type, const char* name, const char* profiling_title,
          std::vector<at::Tensor> inputs, uint64_t sequence, Milliseconds timeout, int peer);

  // --- before the start

  // Keeps a tensor that the transfer reads or writes alive.
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }
  // Adds something to do once the data has arrived, before what was added earlier.  It runs on the thread that
  // completes the operation, in the thread-local state that the caller has now: grad mode, inference mode, dispatch
  // keys and the like.
  void afterwards(std::function<void()> action);
  void set_outputs(std::vector<at::Tensor> outputs) { outputs_ = std::move(outputs); }
  // The root, or -1, and how the tensors are reduced, if they are, for the ledger.
  void says(int root, const char* reduction = "") { entry_.says(root, reduction); }
  // Where the transfer of a message says from which rank it has come.
  int32_t* source(int32_t from) { return &source_.emplace(from); }
  void started(std::unique_ptr<Transfer> transfer) {
    transfer_ = std::move(transfer);
    entry_.start();
  }

  // --- from the start on

  // Tests the transfer once, and completes the operation if it is done.  True when completed (or failed).
  bool poll();
  // As poll(), but leaves the completion, which may run user code, to the caller: true exactly once.
  bool claim();
  void complete();
  // Fails the operation and its group; `what` continues the sentence that begins with describe().
  // `tell`: this process goes on for long enough to tell the other ranks.
  void fail(const std::string& what, Cause cause, bool tell = true,
            c10d::ErrorType kind = c10d::ErrorType::COMM_ERROR);
  // Polls until the operation is completed or the time is `until`; false when it is not completed by then.  Each
  // poll in which the transfer has done a step moves `until` to at least `more` after that poll: the peers are at
  // work too.
  bool drive(Clock::time_point until, Clock::duration more = Clock::duration::zero());
  // Fails the operation if its timeout is over or its group has failed.
  void check(Clock::time_point now);
  // Lets the program handle its signals, now and then while it waits.  What its handlers throw ends the operation.
  void handle_signals(Clock::time_point now);

  // Of the transfer.
  std::optional<uint64_t> steps() const { return transfer_->steps(); }
  const void* moved_with() const { return transfer_->moved_with(); }
  bool is_message() const;
  const Pace& pace() const { return group_->pace; }
  // Whether a thread that waits for it polls it.
  bool is_driven() const { return drivers_.load(std::memory_order_relaxed) > 0; }
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

  // The part of describe() for those who know its group and rank.
  std::string call() const;
  bool poll_until(Clock::time_point until, Clock::duration more);
  // Which message has not been sent or received; empty where this is none.
  Cause missing_message() const;
  // Why it isn't completed, as far as is known.
  Cause delay() const;
  // The same cause, of this operation.
  Cause own(Cause cause) const;
  // The transport has failed: the operation fails, too, once the others could say what they call.
  // `explained`: the cause says that.
  void broke(std::string reason, const Cause& cause, bool explained);
  Said said() const;
  // True for the one thread that may complete or fail the operation.
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
  std::atomic<bool> driven_{false};  // at some time
  std::atomic<int> drivers_{0};      // threads in wait(), but for those that handle signals
  std::vector<at::Tensor> kept_;
  std::vector<at::Tensor> outputs_;
  std::optional<int32_t> source_;
  std::vector<std::function<void()>> afterwards_;
  std::optional<at::ThreadLocalState> callers_state_;  // present when there is something to do afterwards
  std::unique_ptr<Transfer> transfer_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<State> state_{State::running};
  std::atomic<bool> breaks_{false};  // what the next four are is being noted
  std::string broken_reason_;
  std::unique_ptr<const Cause> broken_cause_;
  bool is_explained_ = false;
  Clock::time_point broken_at_;
  std::atomic<bool> broken_{false};
};

}  // namespace cpulaunch
