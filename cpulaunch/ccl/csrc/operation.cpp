#include "operation.hpp"

#include <algorithm>

#include <c10/util/Exception.h>

#include "engine.hpp"
#include "sentinel.hpp"

namespace cpulaunch {

namespace {

// How often a waiter reads the clock and the group's state, in polls, and after how long it asks the
// sentinel to look after its peers.
constexpr unsigned kPollsPerCheck = 256;
constexpr auto kAlertAfter = std::chrono::milliseconds(300);

std::string shapes(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (size_t i = 0; i < tensors.size() && i < 4; ++i) {
    text += c10::str(i == 0 ? "" : ", ", tensors[i].scalar_type(), tensors[i].sizes());
  }
  return tensors.size() > 4 ? c10::str(text, ", … (", tensors.size(), " tensors)") : text;
}

// Without the C++ stack that torch's errors carry along.
std::string reason_of(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs ? torchs->what_without_backtrace() : error.what();
}

std::exception_ptr distributed_error(const std::string& what) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, 0}, what));
}

}  // namespace

void GroupState::fail(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (reason_.empty()) reason_ = reason;
  failed_.store(true, std::memory_order_release);
}

std::string GroupState::reason() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

Operation::Operation(std::shared_ptr<GroupState> group, c10d::OpType type, const char* name, const char* title,
                     std::vector<at::Tensor> inputs, uint64_t sequence, Milliseconds timeout)
    : Work(group->rank, type, title, inputs),
      group_(std::move(group)),
      operation_(name),
      inputs_(std::move(inputs)),
      sequence_(sequence),
      timeout_(timeout),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

std::string Operation::describe() const {
  return c10::str(operation_, " (sequence number ", sequence_, inputs_.empty() ? "" : ", ", shapes(inputs_),
                  ") of group '", group_->name, "', rank ", group_->rank, " of ", group_->size);
}

bool Operation::take() {
  auto running = State::running;
  return state_.compare_exchange_strong(running, State::claimed, std::memory_order_acq_rel);
}

bool Operation::claim() {
  auto& engine = Engine::instance();
  if (engine.stopped()) return false;
  try {
    if (host_sum_ && !host_sum_->advance(ticket_)) return false;
    if (!uses_oneccl_) return take();  // without oneCCL's lock, which is held while a group is made
    auto inside = engine.enter();
    if (!running()) return false;
    // Every event is tested, so that each call makes progress on all of them.
    bool all = true;
    for (auto& event : events_) all = event.test() && all;
    if (!all || !take()) return false;
    events_.clear();  // gives the requests back to oneCCL, hence here
    return true;
  } catch (const std::exception& error) {
    const auto peer = Sentinel::instance().ended_peer(group_.get());
    fail(c10::str("failed: ", peer.empty() ? "" : peer + "; ", error.what()));
    return false;
  }
}

bool Operation::poll() {
  if (claim()) complete();
  return done();
}

void Operation::afterwards(std::function<void()> action) {
  if (!callers_state_) callers_state_.emplace();
  afterwards_.push_back(std::move(action));
}

void Operation::complete() {
  std::exception_ptr error;
  try {
    if (callers_state_) {
      const at::ThreadLocalStateGuard guard(*callers_state_);
      for (auto& action : afterwards_) action();
    }
  } catch (const std::exception& failure) {
    // This rank's results are wrong.  The caller gets the error; the other ranks are told, or they would wait for
    // good for a rank that has left the common order of operations and is still alive.
    const auto text = c10::str(describe(), " could not be completed: ", reason_of(failure));
    group_->fail(text);
    Sentinel::instance().alert(group_);
    error = distributed_error(text);
  }
  finish_with(error);
}

void Operation::fail(const std::string& what) {
  const auto text = c10::str(describe(), " ", what);
  group_->fail(text);
  if (!take()) return;
  if (host_sum_) host_sum_->withdraw();
  // oneCCL may still write to the buffers: they and its requests live until the process ends.
  new auto(c10::intrusive_ptr<Operation>::unsafe_reclaim_from_nonowning(this));
  Sentinel::instance().alert(group_);  // which tells the other ranks
  finish_with(distributed_error(text));
}

void Operation::finish_with(std::exception_ptr error) {
  const auto future = future_;  // a callback may drop the last reference to this operation
  const auto outputs = outputs_;
  if (!error) {
    kept_.clear();
    afterwards_.clear();
  }
  state_.store(State::done, std::memory_order_release);
  --group_->in_flight;
  finish(error);
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(outputs));
  }
}

void Operation::check(Clock::time_point now) {
  const auto waited = now - since_;
  if (waited > timeout_) {
    const auto late = host_sum_ ? host_sum_->late() : "";
    fail(c10::str("was not completed within its timeout of ", timeout_.count() / 1e3, " s: ",
                  late.empty() ? "a rank" : "rank " + late,
                  " did not call it, called something else, or is gone"));
  } else if (group_->failed()) {
    fail(c10::str("cannot complete: ", group_->reason()));
  } else if (waited > kAlertAfter) {
    Sentinel::instance().alert(group_);
  }
}

bool Operation::drive(Clock::time_point until, Clock::duration more) {
  const auto& engine = Engine::instance();
  unsigned idle = 0;
  uint64_t steps = 0;
  for (unsigned polls = 1; !poll(); ++polls) {
    const bool moved = host_sum_ && host_sum_->steps() != steps;
    if (moved) steps = host_sum_->steps();
    idle = moved ? 0 : idle + 1;
    const bool due = polls % kPollsPerCheck == 0 || engine.options().yield;
    if (due || host_sum_) {
      const auto now = Clock::now();
      if (due) check(now);
      if (moved) until = std::max(until, now + more);
      if (now >= until) return done();
      if (engine.stopped()) return false;
    }
    engine.pause(idle);
  }
  return true;
}

bool Operation::isSuccess() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
}

bool Operation::wait(Milliseconds timeout) {
  const auto until = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
  if (!drive(until)) {
    C10_THROW_ERROR(DistBackendError, c10::str(describe(), " was not completed within the ",
                                               timeout.count() / 1e3, " s that wait() was given"));
  }
  std::unique_lock<std::mutex> lock(mutex_);
  // Another thread may have completed it and not yet have said so.
  cv_.wait(lock, [&] { return completed_; });
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

}  // namespace cpulaunch
