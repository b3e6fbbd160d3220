#include "group.hpp"

#include <algorithm>
#include <cstdlib>
#include <future>

#include <torch/version.h>

namespace cpulaunch {

namespace {

// How often connect() looks whether the group has failed, and from when on it has the watchdog look after the peers:
// ranks that are all alive meet within a second.
constexpr auto kConnectInterval = std::chrono::milliseconds(100);
constexpr auto kConnectAlertAfter = std::chrono::seconds(1);
// How often close() looks whether the operations in flight have been completed.
constexpr auto kCloseInterval = std::chrono::milliseconds(1);

std::atomic<int> next_kvs{1};

// oneCCL's log level; an internal of it, which the pinned static archive makes a fixed one.
extern "C" int oneccl_log_level __asm__("_ZN10ccl_logger5levelE");

// At its first level, `warn`, oneCCL would warn that the variable changes the level.
void start_oneccl() {
  const char* level = std::getenv("CCL_LOG_LEVEL");
  if (level && std::string(level) == "error") oneccl_log_level = 0;
  ccl::init();
}

// Whether `mine` is true in all ranks.  As each rank sends a message to each other one, all of oneCCL's shared memory
// is mapped from here on.
bool true_in_all_ranks(bool mine, const ccl::communicator& communicator) {
  std::vector<char> from(communicator.size(), mine), to(communicator.size());
  ccl::alltoall(from.data(), to.data(), 1, ccl::datatype::int8, communicator).wait();
  return std::find(to.begin(), to.end(), 0) == to.end();
}

}  // namespace

ProcessGroupCCL::ProcessGroupCCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout,
                                 std::string name, std::vector<Peer> local_peers, Heartbeat heartbeat,
                                 const ShmOffer& shared_memory, c10::intrusive_ptr<c10d::Backend> gloo_fallback)
    : Backend(rank, size),
      state_(std::make_shared<GroupState>(std::move(name), rank, size)),
      options_(c10::make_intrusive<Options>("ccl", timeout)),
      gloo_fallback_(std::move(gloo_fallback)),
      shm_allreduce_(ShmAllreduce::join(shared_memory, rank, size,
                                        /*one_host=*/static_cast<int>(local_peers.size()) == size - 1)),
      timeout_(timeout) {
  Watchdog::instance().add(state_, store->clone(), local_peers, std::move(heartbeat));
  try {
    connect(store);
  } catch (...) {
    Watchdog::instance().remove(state_.get());
    throw;
  }
}

ProcessGroupCCL::~ProcessGroupCCL() { close(); }

// Connects in a thread of its own, because oneCCL's bootstrap has no time limit that covers a dead peer.
void ProcessGroupCCL::connect(const c10::intrusive_ptr<c10d::Store>& store) {
  struct Connected {
    std::unique_ptr<ccl::communicator> communicator;
    bool all_joined;  // the shared memory
  };
  auto made = std::make_shared<std::promise<Connected>>();
  auto result = made->get_future();
  std::thread([made, store, rank = getRank(), size = getSize(), joined = shm_allreduce_ != nullptr] {
    try {
      const auto inside = enter_oneccl();
      start_oneccl();
      auto kvs = std::make_shared<StoreKvs>(store, next_kvs++);
      auto communicator = ccl::create_communicator(size, rank, std::move(kvs));
      const bool all_joined = true_in_all_ranks(joined, communicator);
      made->set_value({std::make_unique<ccl::communicator>(std::move(communicator)), all_joined});
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
      C10_THROW_ERROR(DistBackendError, c10::str("ccl: the ", getSize(), " ranks of group '", state_->name,
                                                 "' did not come together", state_->failed() ? ": " : " in time",
                                                 state_->reason()));
    }
  }
  try {
    auto connected = result.get();
    communicator_ = std::move(connected.communicator);
    if (!connected.all_joined) shm_allreduce_.reset();
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistBackendError, c10::str("ccl: oneCCL could not connect the ", getSize(), " ranks of group '",
                                               state_->name, "': ", error.what()));
  }
}

void ProcessGroupCCL::close() {
  if (!communicator_) return;
  // The background thread completes the operations that are still in flight; the group's timeout holds for them.
  const auto until = Clock::now() + timeout_;
  while (state_->in_flight > 0 && !state_->failed() && !ProgressEngine::instance().stopped() && Clock::now() < until) {
    std::this_thread::sleep_for(kCloseInterval);
  }
  // A communicator with operations in flight cannot be taken down, nor can one at interpreter exit, or of
  // a subset of the ranks on oneCCL's MPI transport (it hangs): those stay until the process ends.
  const char* transport = std::getenv("CCL_ATL_TRANSPORT");
  const bool leave = state_->in_flight > 0 || state_->failed() || ProgressEngine::instance().stopped() ||
                     (transport && std::string(transport) == "mpi");
  if (leave) {
    static_cast<void>(communicator_.release());
  } else {
    const auto inside = enter_oneccl();
    communicator_.reset();
  }
  Watchdog::instance().remove(state_.get());
}

void ProcessGroupCCL::setTimeout(Milliseconds timeout) {
  timeout_ = timeout;
  options_->timeout = timeout;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 8
  gloo_fallback_->setTimeout(timeout);
#endif
}

void ProcessGroupCCL::abort() {
  state_->fail("the group was aborted");
  gloo_fallback_->abort();
}

c10d::ErrorType ProcessGroupCCL::getError() {
  return state_->failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

ProcessGroupCCL::Ptr<CclWork> ProcessGroupCCL::begin(c10d::OpType type, const char* name, const char* profiling_title,
                                                       Tensors inputs, Milliseconds timeout) {
  if (state_->failed()) {
    C10_THROW_ERROR(DistBackendError, c10::str(name, ": group '", state_->name,
                                               "' cannot be used any more: ", state_->reason()));
  }
  TORCH_CHECK(communicator_, name, ": group '", state_->name, "' was destroyed");
  const auto limit = timeout > kNoTimeout ? timeout : timeout_;
  return c10::make_intrusive<CclWork>(state_, type, name, profiling_title, std::move(inputs), sequence_++, limit);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::run(const Ptr<CclWork>& work, bool asynchronous,
                                                      c10::function_ref<void(CombinedTransfer&)> submit) {
  auto transfer = std::make_unique<CombinedTransfer>();
  auto& transfers = *transfer;
  work->started(std::move(transfer));
  try {
    const auto inside = enter_oneccl();  // in shared memory, too, operations start in one order
    ++state_->in_flight;
    submit(transfers);
  } catch (const std::exception& error) {
    work->fail(c10::str("could not be started: ", error.what()));  // its other tensors may be under way
    work->wait();  // throws that
  }
  ProgressEngine::instance().run(work, asynchronous);
  return work;
}

}  // namespace cpulaunch
