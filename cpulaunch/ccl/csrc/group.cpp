#include "group.hpp"

#include <algorithm>
#include <cstdlib>
#include <future>

#include <torch/version.h>

namespace cpulaunch {

namespace {

std::atomic<int> next_kvs{1};

// oneCCL's log level; an internal of it, which the pinned static archive makes a fixed one.
extern "C" int oneccl_log_level __asm__("_ZN10ccl_logger5levelE");

// At its first level, `warn`, oneCCL would warn that the variable changes the level.
void start_oneccl() {
  const char* level = std::getenv("CCL_LOG_LEVEL");
  if (level && std::string(level) == "error") oneccl_log_level = 0;
  ccl::init();
}

// A message between each two ranks, so that all of oneCCL's shared memory is mapped from here on.
// True when all say yes.
bool all_say(bool yes, const ccl::communicator& communicator) {
  std::vector<char> from(communicator.size(), yes), to(communicator.size());
  ccl::alltoall(from.data(), to.data(), 1, ccl::datatype::int8, communicator).wait();
  return std::find(to.begin(), to.end(), 0) == to.end();
}

}  // namespace

ProcessGroupCCL::ProcessGroupCCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout,
                                 std::string name, std::vector<Peer> local_peers,
                                 Heartbeat heartbeat, std::shared_ptr<HostSum> host_sum,
                                 c10::intrusive_ptr<c10d::Backend> companion)
    : Backend(rank, size),
      state_(std::make_shared<GroupState>(std::move(name), rank, size)),
      options_(c10::make_intrusive<Options>("ccl", timeout)),
      companion_(std::move(companion)),
      host_sum_(std::move(host_sum)),
      timeout_(timeout) {
  Sentinel::instance().add(state_, store->clone(), local_peers, std::move(heartbeat));
  try {
    connect(store);
  } catch (...) {
    Sentinel::instance().remove(state_.get());
    throw;
  }
}

ProcessGroupCCL::~ProcessGroupCCL() { close(); }

// In a thread of its own, because oneCCL's bootstrap has no time limit that covers a dead peer.
void ProcessGroupCCL::connect(const c10::intrusive_ptr<c10d::Store>& store) {
  struct Connected {
    std::unique_ptr<ccl::communicator> communicator;
    bool all_share_memory;
  };
  auto made = std::make_shared<std::promise<Connected>>();
  auto result = made->get_future();
  std::thread([made, store, rank = getRank(), size = getSize(), shares_memory = host_sum_ != nullptr] {
    try {
      auto inside = Engine::instance().enter();
      start_oneccl();
      auto kvs = std::make_shared<StoreKvs>(store, next_kvs++);
      auto communicator = ccl::create_communicator(size, rank, std::move(kvs));
      const bool all = all_say(shares_memory, communicator);
      made->set_value({std::make_unique<ccl::communicator>(std::move(communicator)), all});
    } catch (...) {
      made->set_exception(std::current_exception());
    }
  }).detach();
  const auto until = Clock::now() + timeout_;
  auto patience = Clock::now() + std::chrono::seconds(1);
  while (result.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
    const auto now = Clock::now();
    if (now > patience) Sentinel::instance().alert(state_);
    if (state_->failed() || now > until) {
      C10_THROW_ERROR(DistBackendError, c10::str("ccl: the ", getSize(), " ranks of group '", state_->name,
                                                 "' did not come together", state_->failed() ? ": " : " in time",
                                                 state_->reason()));
    }
  }
  try {
    auto connected = result.get();
    communicator_ = std::move(connected.communicator);
    if (!connected.all_share_memory) host_sum_.reset();
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistBackendError, c10::str("ccl: oneCCL could not connect the ", getSize(), " ranks of group '",
                                               state_->name, "': ", error.what()));
  }
}

void ProcessGroupCCL::close() {
  if (!communicator_) return;
  // Operations still in flight are the background thread's to complete; theirs is the group's time limit.
  const auto until = Clock::now() + timeout_;
  while (state_->in_flight > 0 && !state_->failed() && !Engine::instance().stopped() && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // A communicator with operations in flight cannot be taken down, nor can one at interpreter exit, or of
  // a subset of the ranks on oneCCL's MPI transport (it hangs): those stay until the process ends.
  const char* transport = std::getenv("CCL_ATL_TRANSPORT");
  const bool leave = state_->in_flight > 0 || state_->failed() || Engine::instance().stopped() ||
                     (transport && std::string(transport) == "mpi");
  if (leave) {
    static_cast<void>(communicator_.release());
  } else {
    auto inside = Engine::instance().enter();
    communicator_.reset();
  }
  Sentinel::instance().remove(state_.get());
}

void ProcessGroupCCL::setTimeout(Milliseconds timeout) {
  timeout_ = timeout;
  options_->timeout = timeout;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 8
  companion_->setTimeout(timeout);
#endif
}

void ProcessGroupCCL::abort() {
  state_->fail("the group was aborted");
  companion_->abort();
}

c10d::ErrorType ProcessGroupCCL::getError() {
  return state_->failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

ProcessGroupCCL::Ptr<Operation> ProcessGroupCCL::begin(c10d::OpType type, const char* name, const char* title,
                                                       Tensors inputs, Milliseconds timeout) {
  if (state_->failed()) {
    C10_THROW_ERROR(DistBackendError, c10::str(name, ": group '", state_->name,
                                               "' cannot be used any more: ", state_->reason()));
  }
  TORCH_CHECK(communicator_, name, ": group '", state_->name, "' was destroyed");
  const auto limit = timeout > kNoTimeout ? timeout : timeout_;
  return c10::make_intrusive<Operation>(state_, type, name, title, std::move(inputs), sequence_++, limit);
}

}  // namespace cpulaunch
