#include "work.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <sstream>

#include <c10/util/Exception.h>

#include "lent_team.hpp"
#include "progress.hpp"
#include "watchdog.hpp"

namespace cpulaunch {

namespace {

// A waiting thread checks the clock and the group's state once in this many polls.  A poll takes about a microsecond,
// so the checks take less than a percent of the time.
constexpr unsigned kPollsPerCheck = 256;
// After this time, an operation alerts the watchdog.  Ordinary imbalance between ranks is shorter, and the watchdog's
// queries of the store are not free.
constexpr auto kAlertAfter = std::chrono::milliseconds(300);
// A waiting thread handles signals once in this time.
constexpr auto kSignalsAfter = std::chrono::milliseconds(100);
// How long a rank waits before it publishes its call, if the transport doesn't compare calls.
constexpr auto kPublishAfter = std::chrono::seconds(1);
// How long a rank whose transport has failed waits for the calls that others publish.
constexpr auto kExplainTime = std::chrono::seconds(3);
// The most tensors that an error message lists.
constexpr size_t kTensorsNamed = 4;

// Python's name of a type, such as float32.
std::string python_name(c10::ScalarType type) {
  try {
    return std::string(c10::getDtypeNames(type).first);
  } catch (const std::exception&) {  // the type has no name in Python
    return c10::toString(type);
  }
}

std::string shapes(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (size_t i = 0; i < std::min(tensors.size(), kTensorsNamed); ++i) {
    text += c10::str(i == 0 ? "" : ", ", python_name(tensors[i].scalar_type()), tensors[i].sizes());
  }
  return tensors.size() > kTensorsNamed ? c10::str(text, ", … (", tensors.size(), " tensors)") : text;
}

// The name of the tensors' type, such as float32, padded to the ledger's field.
const char* type_in_ledger(const std::vector<at::Tensor>& tensors) {
  using Name = std::array<char, sizeof(ledger::Operation::type)>;
  static const auto names = [] {
    std::array<Name, static_cast<size_t>(c10::ScalarType::NumOptions)> all{};
    for (size_t i = 0; i < all.size(); ++i) {
      const auto name = python_name(static_cast<c10::ScalarType>(i));
      std::memcpy(all[i].data(), name.data(), std::min(name.size(), all[i].size()));
    }
    return all;
  }();
  static const Name none{};
  return tensors.empty() ? none.data() : names.at(static_cast<size_t>(tensors[0].scalar_type())).data();
}

uint64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.numel() * tensor.element_size();
  return bytes;
}

uint64_t in_ledger(Clock::time_point time) {
  return std::chrono::nanoseconds(Clock::steady(time).time_since_epoch()).count();
}

// The text of an error without the C++ stack that torch appends.
std::string reason_of(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs ? torchs->what_without_backtrace() : error.what();
}

// How many causes of exceptions are kept.  One failure may raise several exceptions, and any of them may be the one
// that ends the program.
constexpr size_t kCausesKept = 64;

struct RecentErrors {
  std::mutex mutex;
  std::deque<std::pair<std::string, Cause>> causes;  // with the errors' texts, the latest first
};

RecentErrors& recent_errors() {
  static auto* errors = new RecentErrors;
  return *errors;
}

std::exception_ptr distributed_error(const std::string& what, const Cause& cause) {
  {
    auto& recent = recent_errors();
    std::lock_guard<std::mutex> lock(recent.mutex);
    recent.causes.emplace_front(what, cause);
    if (recent.causes.size() > kCausesKept) recent.causes.pop_back();
  }
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, 0}, what));
}

// Increments a number during its own lifetime.
class Counted {
 public:
  Counted(std::atomic<int>& number, int by) : number_(number), by_(by) { number_ += by_; }
  ~Counted() { number_ -= by_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<int>& number_;
  const int by_;
};

}  // namespace

// torch may have added text before or after an error's own.
Cause cause_of(const std::string& error) {
  auto& recent = recent_errors();
  std::lock_guard<std::mutex> lock(recent.mutex);
  for (const auto& [text, cause] : recent.causes) {
    if (error.find(text) != std::string::npos) return cause;
  }
  return Cause();
}

void throw_for(const Cause& cause, const std::string& text) { std::rethrow_exception(distributed_error(text, cause)); }

void GroupState::fail(const std::string& reason, const Cause& cause, c10d::ErrorType kind) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (reason_.empty()) {
    reason_ = reason;
    cause_ = cause;
    error_ = kind;
  }
  failed_.store(true, std::memory_order_release);
}

std::string GroupState::reason() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

Cause GroupState::cause() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return cause_;
}

void GroupState::set_delay(uint64_t sequence, const Cause& cause) {
  std::lock_guard<std::mutex> lock(mutex_);
  delayed_ = sequence;
  delay_ = cause;
}

Cause GroupState::delay(uint64_t sequence) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return delayed_ == sequence ? delay_ : Cause();
}

std::string GroupState::describe(const std::string& call) const {
  return c10::str("rank ", members.number_of(rank), ": ", call, " of group '", name, "' of ", size,
                  size == 1 ? " rank" : " ranks");
}

Cause GroupState::about(CauseKind kind, const std::string& ranks) const {
  const auto numbers = numbers_in(ranks);
  if (numbers.empty()) return Cause(kind);
  std::string all;
  for (const int each : numbers) all += (all.empty() ? "" : ", ") + members.name(each);
  return Cause(kind, members, numbers[0]).with(numbers.size() > 1 ? all : "");
}

std::vector<int> numbers_in(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream stream(text);
  char comma;
  for (int number; stream >> number; stream >> comma) numbers.push_back(number);
  return numbers;
}

CclWork::CclWork(std::shared_ptr<GroupState> group, c10d::OpType type, const char* name, const char* profiling_title,
                 std::vector<at::Tensor> inputs, uint64_t sequence, Milliseconds timeout, int peer)
    : Work(group->rank, type, profiling_title, inputs),
      group_(std::move(group)),
      name_(name),
      kind_(profiling_title),
      inputs_(std::move(inputs)),
      sequence_(sequence),
      timeout_(timeout),
      entry_(group_->ledger, sequence, name, type_in_ledger(inputs_), bytes_of(inputs_), peer, in_ledger(started_at_)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

bool CclWork::is_message() const {
  const auto type = retrieveOpType();
  return type == c10d::OpType::SEND || type == c10d::OpType::RECV;
}

std::string CclWork::describe() const { return group_->describe(call()); }

std::string CclWork::call() const {
  return c10::str(name_, " (sequence number ", sequence_, inputs_.empty() ? "" : ", ", shapes(inputs_), ")");
}

bool CclWork::wins() {
  auto running = State::running;
  return state_.compare_exchange_strong(running, State::claimed, std::memory_order_acq_rel);
}

bool CclWork::claim() {
  if (ProgressEngine::instance().stopped() || broken_.load(std::memory_order_acquire)) return false;
  try {
    return transfer_->test() && wins();
  } catch (const std::exception& error) {
    const auto peer = Watchdog::instance().ended_peer(group_.get());
    const auto* mismatch = dynamic_cast<const Mismatch*>(&error);
    const auto cause = mismatch ? mismatch->cause : Cause(CauseKind::transport_failed);
    if (peer.empty() && group_->size > 1) {
      broke(reason_of(error), cause, mismatch != nullptr);
    } else {
      fail(c10::str("failed: ", peer.empty() ? "" : peer.text() + "; ", reason_of(error)),
           mismatch || peer.empty() ? cause : peer);
    }
    return false;
  }
}

void CclWork::broke(std::string reason, const Cause& cause, bool explained) {
  if (breaks_.exchange(true)) return;
  broken_reason_ = std::move(reason);
  broken_cause_ = std::make_unique<const Cause>(cause);
  is_explained_ = explained;
  broken_at_ = Clock::now();
  broken_.store(true, std::memory_order_release);
}

bool CclWork::poll() {
  if (claim()) complete();
  return done();
}

void CclWork::afterwards(std::function<void()> action) {
  if (!callers_state_) callers_state_.emplace();
  afterwards_.push_back(std::move(action));
}

void CclWork::complete() {
  std::exception_ptr error;
  try {
    if (callers_state_) {
      const at::ThreadLocalStateGuard guard(*callers_state_);
      for (auto action = afterwards_.rbegin(); action != afterwards_.rend(); ++action) (*action)();
    }
  } catch (const std::exception& failure) {
    // This rank's results are wrong, and its caller gets the error.  The caller may then not make the same calls as the
    // other ranks, which would wait for it until their timeout.  So the group fails in all ranks.
    const auto what = c10::str(" could not be completed: ", reason_of(failure));
    const auto cause = own(Cause(CauseKind::callback_failed));
    group_->fail(call() + what, cause);
    Watchdog::instance().alert(group_);
    error = distributed_error(describe() + what, cause);
  }
  finish_with(error);
}

Cause CclWork::own(Cause cause) const {
  if (cause.finder >= 0) return cause;  // another rank found it, and has added its own operation
  cause.sequence = sequence_;
  write_text(cause.operation, name_);
  return cause;
}

void CclWork::fail(const std::string& what, Cause cause, bool tell, c10d::ErrorType kind) {
  if (!wins()) return;  // another thread has completed or failed the operation
  cause = own(cause);
  group_->fail(c10::str(call(), " ", what), cause, kind);
  transfer_->abort();
  // Leak this operation, which holds the buffers: the transport may still write to them.
  new auto(c10::intrusive_ptr<CclWork>::unsafe_reclaim_from_nonowning(this));
  if (tell) Watchdog::instance().alert(group_);  // the watchdog reports the failure to the other ranks
  finish_with(distributed_error(c10::str(describe(), " ", what), cause));
}

void CclWork::finish_with(std::exception_ptr error) {
  const auto future = future_;  // a callback may drop the last reference to this operation
  const auto outputs = outputs_;
  if (!error) {
    kept_.clear();
    afterwards_.clear();
    callers_state_.reset();
  }
  entry_.end(/*failed=*/error != nullptr);
  ended_at_ = Clock::now();
  if (!error && group_->hook()) call_hook();
  state_.store(State::done, std::memory_order_release);
  --group_->in_flight;
  finish(error);
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(outputs));
  }
}

void CclWork::call_hook() const {
  using Time = decltype(c10d::WorkInfo::timeStarted);  // system or steady clock, depending on torch's version
  const auto shown = [](Clock::time_point time) {
    return Time::clock::now() - std::chrono::duration_cast<Time::duration>(Clock::now() - time);
  };
  group_->hook()(std::make_shared<c10d::WorkInfo>(retrieveOpType(), sequence_, shown(started_at_), shown(ended_at_),
                                                  ended_at_ - started_at_));
}

float CclWork::getDuration() const {
  TORCH_CHECK(done(), describe(), " is not completed, and so has no duration");
  return std::chrono::duration<float, std::milli>(ended_at_ - started_at_).count();
}

void CclWork::check(Clock::time_point now) {
  const auto waited = now - started_at_;
  const bool broken = broken_.load(std::memory_order_acquire);
  if (waited > timeout_) {
    auto cause = delay();
    cause.timeout = timeout_.count();
    fail(c10::str("was not completed within its timeout of ", timeout_.count() / 1e3, " s: ", cause.text()), cause,
         /*tell=*/true, c10d::ErrorType::TIMEOUT);
  } else if (group_->failed() && !(broken && is_explained_)) {
    const auto missing = missing_message();
    fail(c10::str(broken ? "failed: " + broken_reason_ + "; " : "cannot complete: ", group_->reason(),
                  missing.empty() ? "" : "; ", missing.text()), group_->cause());
  } else if (broken && (group_->failed() || now - broken_at_ > kExplainTime)) {
    const auto others = is_explained_ ? Cause() : group_->delay(sequence_);
    fail(c10::str("failed: ", others.text(), others.empty() ? "" : "; ", broken_reason_),
         others.empty() ? *broken_cause_ : others);
  } else if (broken || waited > kAlertAfter) {
    const auto ranks = transfer_->stragglers();
    entry_.waits_for(ranks);
    Watchdog::instance().alert(group_, transfer_->lost(), transfer_->needed());
    if (transfer_->peer()) return;
    // Start asking after half of the timeout, so that the other half is left for the answers.
    const bool asks = broken || waited > timeout_ / 2;
    if (asks || (ranks.empty() && waited > kPublishAfter)) {
      Watchdog::instance().publish_wait(group_.get(), sequence_, ranks, summary(), asks);
    }
  }
}

void CclWork::handle_signals(Clock::time_point now) {
  thread_local Clock::time_point handled{};
  if (now - started_at_ < kSignalsAfter || now - handled < kSignalsAfter) return;
  handled = now;
  const Counted away(drivers_, -1);
  try {
    ProgressEngine::instance().handle_signals();
  } catch (...) {
    // If this process continues, the watchdog notifies the other ranks.  If it ends, they notice that, and it need not
    // wait.
    Watchdog::instance().alert(group_);
    fail("was left by a signal handler's exception", Cause(CauseKind::signal_handler), /*tell=*/false);
    throw;
  }
}

Cause CclWork::missing_message() const {
  const auto missing = transfer_->missing();
  if (missing.empty()) return Cause();
  const auto peer = transfer_->peer().value_or(-1);
  const Cause cause = peer < 0 ? Cause(CauseKind::message_missing)
                               : Cause(CauseKind::message_missing, group_->members, peer);
  return cause.with(missing);
}

Cause CclWork::delay() const {
  if (auto missing = missing_message(); !missing.empty()) return missing;
  const auto found = group_->delay(sequence_);
  if (!found.empty()) return found;
  // The watchdog found no cause, so name the ranks that the transfer waits for.
  const auto ranks = transfer_->stragglers();
  return group_->about(ranks.empty() ? CauseKind::peer_late : CauseKind::peer_awaited, ranks);
}

CallSummary CclWork::summary() const {
  std::string must_agree = kind_;
  const auto type = retrieveOpType();
  if (type == c10d::OpType::ALLREDUCE || type == c10d::OpType::REDUCE || type == c10d::OpType::BROADCAST) {
    must_agree = c10::str(kind_, inputs_[0].scalar_type(), inputs_[0].numel());
  }
  return {c10::str(name_, inputs_.empty() ? "" : " of ", shapes(inputs_)), must_agree};
}

bool CclWork::drive(Clock::time_point until, Clock::duration more) {
  if (poll()) return true;
  if (!ledger::is_open()) return poll_until(until, more);
  // The first driver has waited since the call; later ones wait from now on.
  const auto since = driven_.exchange(true, std::memory_order_relaxed) ? ledger::now() : entry_.enqueued_at();
  const bool is_done = poll_until(until, more);
  const auto end = entry_.ended_at();
  ledger::add_waiting(std::max(end ? end : ledger::now(), since) - since);
  return is_done;
}

bool CclWork::poll_until(Clock::time_point until, Clock::duration more) {
  const auto& engine = ProgressEngine::instance();
  const bool limited = until != Clock::time_point::max();
  Idle idle;
  std::optional<uint64_t> steps;
  for (unsigned polls = 1; !poll(); ++polls) {
    const auto steps_now = transfer_->steps();
    const bool moved = steps_now != steps;
    steps = steps_now;
    idle.count(moved);
    const bool due = polls % kPollsPerCheck == 0 || group_->pace.crowded;
    if (due || limited) {
      const auto now = Clock::now();
      if (due) check(now);
      if (due) handle_signals(now);
      if (moved) until = std::max(until, now + more);
      if (now >= until) return done();
      if (engine.stopped()) return false;
    }
    engine.pause(idle, group_->pace);
  }
  return true;
}

bool CclWork::isSuccess() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
}

bool CclWork::wait(Milliseconds timeout) {
  const auto until = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
  const ProgressEngine::Visit visit(ProgressEngine::instance(), is_message());
  const Counted driver(drivers_, 1);
  const LentTeam team(ProgressEngine::instance().openmp_threads(group_->pace));
  if (!drive(until)) {
    auto cause = own(delay());
    cause.timeout = timeout.count();
    throw_for(cause, c10::str(describe(), " was not completed within the ", timeout.count() / 1e3,
                              " s that wait() was given: ", cause.text()));
  }
  std::unique_lock<std::mutex> lock(mutex_);
  // The thread that completes the operation may not have notified c10d::Work yet.
  cv_.wait(lock, [&] { return completed_; });
  waited_for_ = true;
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

}  // namespace cpulaunch
