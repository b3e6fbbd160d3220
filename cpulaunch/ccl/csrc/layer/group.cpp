#include "group.hpp"

#include <algorithm>
#include <cstdlib>
#include <future>
#include <vector>

#include <torch/version.h>

#include "boundary.hpp"
#include "buffers.hpp"
#include "forked.hpp"
#include "shared_memory.hpp"

namespace cpulaunch {

namespace {

// How often connect() checks whether the group has failed, and how long it waits before it alerts the watchdog: if all
// ranks are alive, they meet within a second.
constexpr auto kConnectInterval = std::chrono::milliseconds(100);
constexpr auto kConnectAlertAfter = std::chrono::seconds(1);
// How often finish() checks whether the operations in flight are complete.
constexpr auto kCloseInterval = std::chrono::milliseconds(1);
// How often leave_all() checks whether this rank has left.
constexpr auto kLeaveInterval = std::chrono::microseconds(100);

struct OpenGroups {
  std::mutex mutex;
  std::vector<ProcessGroupCCL*> all;  // in the order in which they were made
};

// Wraps a store for the core.  The caller must keep the store alive while the ranks connect.
cl_store in_c(c10d::Store& store) {
  const auto get = [](void* self, const char* key, char** value, size_t* size, cl_error* error) -> int {
    return guarded(error, [&] {
      auto& its = *static_cast<c10d::Store*>(self);
      if (!its.check({key})) return false;
      const auto bytes = its.get(key);
      *value = static_cast<char*>(std::malloc(bytes.size() + 1));
      std::copy(bytes.begin(), bytes.end(), *value);
      *size = bytes.size();
      return true;
    });
  };
  const auto set = [](void* self, const char* key, const char* value, size_t size, cl_error* error) {
    guarded(error, [&] { static_cast<c10d::Store*>(self)->set(key, std::vector<uint8_t>(value, value + size)); });
  };
  return {&store, get, set};
}

OpenGroups& open_groups() {
  static auto* groups = new OpenGroups;
  return *groups;
}

}  // namespace

ProcessGroupCCL::ProcessGroupCCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout,
                                 std::string name, Members members, const std::string& in_ledger, Pace pace,
                                 std::vector<Peer> local_peers, Heartbeat heartbeat, StoreIntervals intervals,
                                 Carrier carrier, MakeGloo make_gloo)
    : Backend(rank, size),
      state_(std::make_shared<GroupState>(std::move(name), rank, size, std::move(members), in_ledger, pace)),
      store_(store),
      options_(c10::make_intrusive<Options>("ccl", timeout)),
      make_gloo_(std::move(make_gloo)),
      timeout_(timeout) {
  Watchdog::instance().add(state_, store, local_peers, std::move(heartbeat), intervals);
  try {
    connect(std::move(carrier));
  } catch (...) {
    Watchdog::instance().remove(state_.get());
    throw;
  }
  std::lock_guard<std::mutex> lock(open_groups().mutex);
  open_groups().all.push_back(this);
}

ProcessGroupCCL::~ProcessGroupCCL() {
  close();
  if (is_forked()) {  // leak them: gloo's destructor would wait for threads that exist in the parent only
    new auto(make_gloo_);
    new auto(gloo_fallback_);
  }
}

// Connects in a separate thread, because oneCCL's bootstrap has no time limit that covers a dead peer.
void ProcessGroupCCL::connect(Carrier carrier) {
  auto made = std::make_shared<std::promise<std::unique_ptr<Transport>>>();
  auto result = made->get_future();
  std::thread([made, store = store_, carrier = std::move(carrier)] {
    try {
      const auto its_store = in_c(*store);
      made->set_value(import_transport(
          unguarded([&](cl_error* error) { return carrier->connect(carrier.get(), &its_store, error); })));
    } catch (...) {
      made->set_exception(std::current_exception());
    }
  }).detach();
  const auto until = Clock::now() + timeout_;
  const auto alert_from = Clock::now() + kConnectAlertAfter;
  while (result.wait_for(kConnectInterval) != std::future_status::ready) {
    const auto now = Clock::now();
    if (now > alert_from) Watchdog::instance().alert(state_);
    if (state_->failed() || now > until) {
      auto cause = state_->failed() ? state_->cause() : Cause(CauseKind::peer_late);
      if (!state_->failed()) cause.timeout = timeout_.count();
      throw_for(cause, c10::str("ccl: the ", getSize(), " ranks of group '", state_->name, "' did not come together",
                                state_->failed() ? ": " : " in time", state_->reason()));
    }
  }
  try {
    transport_ = result.get();
  } catch (const std::exception& error) {
    throw_for(Cause(CauseKind::transport_failed), c10::str("ccl: the ", getSize(), " ranks of group '", state_->name,
                                                           "' could not be connected: ", error.what()));
  }
}

void ProcessGroupCCL::check_calls() {
  if (!transport_ || is_forked() || state_->failed()) return;
  try {
    transport_->check_calls();
  } catch (const Mismatch& mismatch) {
    state_->fail(c10::str("ranks have called different collectives: ", mismatch.what()), mismatch.cause);
    Watchdog::instance().alert(state_);  // the watchdog reports the failure to the other ranks
    throw_for(mismatch.cause, c10::str(state_->describe("a collective"), " failed: ", mismatch.what()));
  }
}

void ProcessGroupCCL::check_all_calls() {
  if (is_forked()) return;
  std::lock_guard<std::mutex> lock(open_groups().mutex);
  for (auto* group : open_groups().all) group->check_calls();
}

// Leaves all groups at once: a rank may have left some of them, or leave them in a different order.
void ProcessGroupCCL::leave_all() {
  if (is_forked()) return;
  std::lock_guard<std::mutex> lock(open_groups().mutex);
  std::vector<Transport*> stay;
  for (auto* group : open_groups().all) {
    if (group->transport_ && group->state_->in_flight == 0 && !group->state_->failed()) {
      stay.push_back(group->transport_.get());
    }
  }
  for (;;) {
    stay.erase(std::remove_if(stay.begin(), stay.end(), [](Transport* each) { return each->leave(); }), stay.end());
    if (stay.empty()) return;
    std::this_thread::sleep_for(kLeaveInterval);
  }
}

void ProcessGroupCCL::shutdown() {
  finish();
  try {
    check_calls();
  } catch (...) {
    close();
    throw;
  }
  close();
}

void ProcessGroupCCL::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK_VALUE(!onCompletionHook_, "ccl: group '", state_->name, "' has a completion hook already");
  TORCH_CHECK(state_->in_flight == 0, "ccl: operations of group '", state_->name, "' are in flight, which a completion "
              "hook would miss");
  onCompletionHook_ = hook;
  state_->set_hook(std::move(hook));
}

// Waits, at most for the group's timeout, until the background thread has completed the operations in flight.
void ProcessGroupCCL::finish() {
  const auto until = Clock::now() + timeout_;
  while (!is_forked() && state_->in_flight > 0 && !state_->failed() && !ProgressEngine::instance().stopped() &&
         Clock::now() < until) {
    std::this_thread::sleep_for(kCloseInterval);
  }
}

void ProcessGroupCCL::close() {
  if (!transport_) return;
  if (is_forked()) {
    static_cast<void>(transport_.release());  // leak it: its connections and operations belong to the parent
    return;
  }
  {
    std::lock_guard<std::mutex> lock(open_groups().mutex);
    auto& all = open_groups().all;
    all.erase(std::remove(all.begin(), all.end(), this), all.end());
  }
  finish();
  transport_->close(state_->in_flight > 0 || state_->failed() || ProgressEngine::instance().stopped());
  transport_.reset();
  state_->ledger.close();
  Watchdog::instance().remove(state_.get());
}

Transport& ProcessGroupCCL::transport(const char* operation) const {
  TORCH_CHECK(transport_, operation, ": group '", state_->name, "' was destroyed");
  TORCH_CHECK(!is_forked(), operation, ": group '", state_->name, "' is that of the process from which this one was "
              "forked: a forked process takes no part in collectives");
  return *transport_;
}

void ProcessGroupCCL::setTimeout(Milliseconds timeout) {
  timeout_ = timeout;
  options_->timeout = timeout;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 8
  if (gloo_fallback_) gloo_fallback_->setTimeout(timeout);
#endif
}

bool ProcessGroupCCL::shares_memory() const { return transport_ && transport_->abilities.shared_memory; }

bool ProcessGroupCCL::share_memory(const at::Tensor& tensor) {
  check_tensor({"share_memory"}, tensor);
  return cpulaunch::share_memory(tensor);
}

at::Tensor ProcessGroupCCL::allocateTensor(long size, at::TensorOptions options) {
  return allocate_shared(size, options);
}

void ProcessGroupCCL::abort() {
  state_->fail("the group was aborted", Cause(CauseKind::aborted));
  if (gloo_fallback_) gloo_fallback_->abort();
}

c10d::ErrorType ProcessGroupCCL::getError() { return state_->error(); }

// All ranks must make the gloo group together.  The sparse and bitwise reductions that need it are called by all ranks.
// If gloo also carries messages, which only two ranks call, create.py has made the group beforehand.
c10d::Backend& ProcessGroupCCL::gloo() {
  std::call_once(gloo_made_, [this] { gloo_fallback_ = make_gloo_(); });
  return *gloo_fallback_;
}

}  // namespace cpulaunch
