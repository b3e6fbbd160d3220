#include "communicator.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>

#include "boundary.hpp"
#include "forked.hpp"

namespace cpulaunch {

namespace {

// How long a rank sleeps after a round of queries that found nothing new: at first about as long as a query takes, then
// longer, but always short compared with making a group (some 10 ms).
constexpr auto kMinBackoff = std::chrono::microseconds(50);
constexpr auto kMaxBackoff = std::chrono::microseconds(2000);

// oneCCL finds its peers through torch's store, so a group needs no address of its own.
//
// oneCCL's barriers query the same keys again and again, without a pause.  If ranks share cores, that keeps the store's
// only thread, in rank 0, from answering ranks that have yet to arrive: eight ranks on two cores took minutes, or did
// not meet within oneCCL's limit.  So after queries that found nothing new, a rank sleeps a little, longer each time.
class StoreKvs final : public ccl::kvs_interface {
 public:
  StoreKvs(const cl_store& store, int id) : store_(store), id_(id) {}

  // Returns an empty value while the key is missing; oneCCL then asks again.  Called by one thread.
  ccl::vector_class<char> get(const ccl::string_class& key) override;
  void set(const ccl::string_class& key, const ccl::vector_class<char>& data) override;
  int get_id() override { return id_; }

  // Called when the ranks have met; from then on, the store isn't used.  oneCCL writes to it once more while a
  // communicator is destroyed, when rank 0's store may be gone, and torch would log that at length.
  void end() { store_.reset(); }

 private:
  void back_off_if_unchanged(const std::string& key, const std::string& value);

  std::optional<cl_store> store_;  // none from end() on
  const int id_;
  std::unordered_map<std::string, std::string> seen_;  // key → the last answer
  std::string round_;  // the first key of a round of queries that find nothing new
  std::chrono::microseconds backoff_{0};
};

// Only one thread at a time may be inside oneCCL, so oneCCL is called only while this lock is held.
std::unique_lock<std::mutex> enter_oneccl() {
  static auto* mutex = new std::mutex;  // never destroyed: background threads may outlive static objects
  return std::unique_lock<std::mutex>(*mutex);
}

// A oneCCL operation that has been started.
class OneCclTransfer final : public Transfer {
 public:
  explicit OneCclTransfer(ccl::event event) : event_(std::move(event)) {}

  bool test() override {
    if (done_.load(std::memory_order_acquire)) return true;
    const auto inside = enter_oneccl();
    if (done_.load(std::memory_order_acquire)) return true;
    if (aborted_.load(std::memory_order_acquire) || !event_->test()) return false;
    event_.reset();
    done_.store(true, std::memory_order_release);
    return true;
  }
  // oneCCL cannot cancel an operation.  Peers that need more than what has been sent wait until their watchdog sees
  // this rank's failure.
  void abort() override { aborted_.store(true, std::memory_order_release); }
  std::string stragglers() override { return ""; }

 private:
  std::optional<ccl::event> event_;  // used and destroyed under the lock: its destructor returns the request to oneCCL
  // Release and acquire: a thread that reads `done_` without the lock also sees the data that another thread has
  // received.
  std::atomic<bool> done_{false};
  std::atomic<bool> aborted_{false};
};

class Then final : public Transfer {
 public:
  Then(std::unique_ptr<Transfer> transfer, std::function<void()> action)
      : transfer_(std::move(transfer)), action_(std::move(action)) {}

  bool test() override {
    if (done_.load(std::memory_order_acquire)) return true;
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_.load(std::memory_order_relaxed)) return true;
    if (!transfer_->test()) return false;
    action_();
    done_.store(true, std::memory_order_release);
    return true;
  }
  void abort() override { transfer_->abort(); }
  std::string stragglers() override { return transfer_->stragglers(); }

 private:
  const std::unique_ptr<Transfer> transfer_;
  const std::function<void()> action_;
  std::mutex mutex_;
  std::atomic<bool> done_{false};
};

std::atomic<int> next_kvs{1};

// oneCCL's log level.  The variable is internal to oneCCL, but the static archive is pinned, so its name can't change.
extern "C" int oneccl_log_level __asm__("_ZN10ccl_logger5levelE");

// At its default level, `warn`, oneCCL would warn that CCL_LOG_LEVEL changes the level.
void initialize() {
  const char* level = std::getenv("CCL_LOG_LEVEL");
  if (level && std::string(level) == "error") oneccl_log_level = 0;
  ccl::init();
}

ccl::vector_class<char> StoreKvs::get(const ccl::string_class& key) {
  if (!store_) return {};
  std::string value;
  // A key never disappears: oneCCL removes a value by writing an empty one.
  char* found = nullptr;
  size_t size = 0;
  if (unguarded([&](cl_error* error) { return store_->get(store_->self, key.c_str(), &found, &size, error); })) {
    value.assign(found, size);
    std::free(found);
  }
  back_off_if_unchanged(key, value);
  return {value.begin(), value.end()};
}

// Sleeps once per round over all ranks' keys, longer each time.
void StoreKvs::back_off_if_unchanged(const std::string& key, const std::string& value) {
  const auto [entry, first] = seen_.try_emplace(key, value);
  if ((first && !value.empty()) || entry->second != value) {
    entry->second = value;
    round_.clear();
    backoff_ = std::chrono::microseconds(0);
    return;
  }
  if (round_.empty()) round_ = key;
  if (round_ != key) return;
  backoff_ = std::clamp<std::chrono::microseconds>(2 * backoff_, kMinBackoff, kMaxBackoff);
  std::this_thread::sleep_for(backoff_);
}

void StoreKvs::set(const ccl::string_class& key, const ccl::vector_class<char>& data) {
  if (!store_) return;
  cl_error error{};
  store_->set(store_->self, key.c_str(), data.data(), data.size(), &error);
  throw_error(error);
}

// Other groups' operations pause meanwhile.  They couldn't continue without this lock either: while the ranks exchange
// their addresses, oneCCL 2022.2 holds a spin lock on its table of addresses, which every send and receive needs
// (atl_ofi::get_rank2proc_map and atl_ofi_get_addr).
std::unique_ptr<ccl::communicator> make_communicator(std::shared_ptr<StoreKvs> kvs, int rank, int size) {
  const auto inside = enter_oneccl();
  initialize();
  return std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, std::move(kvs)));
}

}  // namespace

// When a process ends, oneCCL waits for threads of its own, which a forked process doesn't have.
void end_forked_process(int status, void*) {
  if (!is_forked()) return;
  std::fflush(nullptr);
  _exit(status);
}

std::unique_ptr<ccl::communicator> connect_oneccl(const cl_store& store, int rank, int size) {
  auto kvs = std::make_shared<StoreKvs>(store, next_kvs++);
  auto communicator = make_communicator(kvs, rank, size);
  // Each rank sends a message to every other rank, so all of oneCCL's shared memory is mapped from here on.
  std::vector<char> from(size), to(size);
  const auto greeting = start_oneccl(
      [&] { return ccl::alltoall(from.data(), to.data(), 1, ccl::datatype::int8, *communicator); });
  while (!greeting->test()) std::this_thread::sleep_for(kMinBackoff);
  kvs->end();
  [[maybe_unused]] static const int registered = on_exit(end_forked_process, nullptr);  // runs before oneCCL's own
  return communicator;
}

// Two kinds of communicators cannot be destroyed: those with operations in flight, and, on oneCCL's MPI transport,
// those of a subset of the ranks (it hangs).  They stay until the process ends.
void disconnect_oneccl(std::unique_ptr<ccl::communicator> communicator, bool in_flight) {
  const char* transport = std::getenv("CCL_ATL_TRANSPORT");
  if (in_flight || (transport && std::string(transport) == "mpi")) {
    static_cast<void>(communicator.release());
  } else {
    const auto inside = enter_oneccl();
    communicator.reset();
  }
}

std::unique_ptr<Transfer> start_oneccl(const std::function<ccl::event()>& call) {
  const auto inside = enter_oneccl();
  return std::make_unique<OneCclTransfer>(call());
}

std::unique_ptr<Transfer> then(std::unique_ptr<Transfer> transfer, std::function<void()> action) {
  return std::make_unique<Then>(std::move(transfer), std::move(action));
}

ccl::datatype datatype_of(NumberType type) {
  switch (type) {
    case NumberType::float64: return ccl::datatype::float64;
    case NumberType::float32: return ccl::datatype::float32;
    case NumberType::float16: return ccl::datatype::float16;
    case NumberType::bfloat16: return ccl::datatype::bfloat16;
    case NumberType::int64: return ccl::datatype::int64;
    case NumberType::int32: return ccl::datatype::int32;
    case NumberType::int16: return ccl::datatype::int16;
    case NumberType::int8: return ccl::datatype::int8;
    case NumberType::uint64: return ccl::datatype::uint64;
    case NumberType::uint32: return ccl::datatype::uint32;
    case NumberType::uint16: return ccl::datatype::uint16;
    case NumberType::uint8:
    case NumberType::boolean: break;
  }
  return ccl::datatype::uint8;
}

ccl::reduction reduction_of(NumberType type, Reduction reduction) {
  switch (as_calculated(type, reduction)) {
    case Reduction::sum: return ccl::reduction::sum;
    case Reduction::product: return ccl::reduction::prod;
    case Reduction::min: return ccl::reduction::min;
    case Reduction::max: return ccl::reduction::max;
    default: throw std::invalid_argument(std::string("ccl: oneCCL has no ") + name_of(reduction));
  }
}

SideBySide::SideBySide(Parts parts) : parts_(std::move(parts)) {
  bool adjacent = true;
  for (const auto& part : parts_) {
    sizes.push_back(part.bytes);
    if (part.bytes == 0) continue;
    if (!data) data = part.data;
    adjacent = adjacent && data + bytes == part.data;
    bytes += part.bytes;
  }
  if (adjacent) return;
  joined_.reset(new char[bytes]);
  data = joined_.get();
}

void SideBySide::join() const {
  char* next = joined_.get();
  for (const auto& part : parts_) {
    if (!next || part.bytes == 0) continue;
    std::memcpy(next, part.data, part.bytes);
    next += part.bytes;
  }
}

void SideBySide::split() const {
  const char* next = joined_.get();
  for (const auto& part : parts_) {
    if (!next || part.bytes == 0) continue;
    std::memcpy(part.data, next, part.bytes);
    next += part.bytes;
  }
}

}  // namespace cpulaunch
