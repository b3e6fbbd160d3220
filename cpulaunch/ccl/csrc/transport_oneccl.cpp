#include "transport_oneccl.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>

#include "buffers.hpp"
#include "forked.hpp"
#include "reduction.hpp"

namespace cpulaunch {

namespace {

// The sleep after a round of queries in vain: at first about what a query takes, then longer, up to a time that adds
// little to making a group (some 10 ms).
constexpr auto kMinBackoff = std::chrono::microseconds(50);
constexpr auto kMaxBackoff = std::chrono::microseconds(2000);

// oneCCL finds its peers through torch's store, so that a group needs no address of its own.
//
// oneCCL's barriers ask for the same keys again and again, without a pause.  Where ranks share cores, that keeps the
// store's one thread, in rank 0, from answering those that still have to arrive: eight ranks on two cores took minutes,
// or did not meet within oneCCL's limit.  So a rank that asks in vain sleeps a little, longer each time.
class StoreKvs final : public ccl::kvs_interface {
 public:
  StoreKvs(c10::intrusive_ptr<c10d::Store> store, int id) : store_(std::move(store)), id_(id) {}

  // Empty while the key is missing: oneCCL asks again.  Called by one thread.
  ccl::vector_class<char> get(const ccl::string_class& key) override;
  void set(const ccl::string_class& key, const ccl::vector_class<char>& data) override;
  int get_id() override { return id_; }

  // The ranks have met.  oneCCL writes once more while it is torn down, when rank 0's store may be gone, which torch
  // would report at length.
  void end() { store_.reset(); }

 private:
  void back_off_if_unchanged(const std::string& key, const std::string& value);

  c10::intrusive_ptr<c10d::Store> store_;  // null from end() on
  int id_;
  std::unordered_map<std::string, std::string> seen_;  // key → the last answer
  std::string round_;  // the key at which a round of queries in vain begins
  std::chrono::microseconds backoff_{0};
};

// One thread at a time may be inside oneCCL.  It is called only while this lock is held.
std::unique_lock<std::mutex> enter_oneccl() {
  static auto* mutex = new std::mutex;  // never destroyed: background threads may outlive static objects
  return std::unique_lock<std::mutex>(*mutex);
}

// An operation of oneCCL's that has been started.
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
  std::optional<ccl::event> event_;  // used under the lock; destroyed there, as that gives oneCCL its request back
  // Release and acquire: a thread that sees `done_` without the lock sees the data that another one has received.
  std::atomic<bool> done_{false};
  std::atomic<bool> aborted_{false};
};

// Without anything to wait for.
std::unique_ptr<Transfer> done_at_once() { return std::make_unique<CombinedTransfer>(); }

// The type that oneCCL is given for a tensor's elements, and how many of it make up one of them: a complex number is
// two of its parts, for example.
struct ElementType {
  ccl::datatype type;
  size_t per_element;

  size_t count(const at::Tensor& tensor) const { return tensor.numel() * per_element; }
};

// For operations that only move data: any type, by its size.
ElementType type_to_move(const at::Tensor& tensor) {
  const size_t bytes = tensor.element_size();
  if (bytes % 8 == 0) return {ccl::datatype::int64, bytes / 8};
  if (bytes % 4 == 0) return {ccl::datatype::int32, bytes / 4};
  if (bytes % 2 == 0) return {ccl::datatype::int16, bytes / 2};
  return {ccl::datatype::int8, bytes};
}

// For reductions.  Throws for types that oneCCL does not reduce.
ElementType type_to_reduce(c10::ScalarType type, c10d::ReduceOp::RedOpType op) {
  using c10d::ReduceOp;
  switch (type) {
    case at::kFloat: return {ccl::datatype::float32, 1};
    case at::kDouble: return {ccl::datatype::float64, 1};
    case at::kBFloat16: return {ccl::datatype::bfloat16, 1};
    case at::kHalf: return {ccl::datatype::float16, 1};
    case at::kLong: return {ccl::datatype::int64, 1};
    case at::kInt: return {ccl::datatype::int32, 1};
    case at::kShort: return {ccl::datatype::int16, 1};
    case at::kChar: return {ccl::datatype::int8, 1};
    case at::kByte: return {ccl::datatype::uint8, 1};
    case at::kBool: return {ccl::datatype::uint8, 1};
    case at::kUInt16: return {ccl::datatype::uint16, 1};
    case at::kUInt32: return {ccl::datatype::uint32, 1};
    case at::kUInt64: return {ccl::datatype::uint64, 1};
    case at::kComplexFloat:
    case at::kComplexDouble:
      TORCH_CHECK_VALUE(op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM,
                        "ccl: complex tensors can be reduced with SUM and AVG only");
      return {type == at::kComplexFloat ? ccl::datatype::float32 : ccl::datatype::float64, 2};
    default: TORCH_CHECK_TYPE(false, "ccl: cannot reduce tensors of type ", type);
  }
}

// Throws for what is not a plain reduction (the bitwise ones).
ccl::reduction reduction_of(c10d::ReduceOp::RedOpType op, c10::ScalarType type) {
  using c10d::ReduceOp;
  // A bool is a byte of 0 or 1 that has to stay one.
  const bool boolean = type == at::kBool;
  switch (op) {
    case ReduceOp::SUM: return boolean ? ccl::reduction::max : ccl::reduction::sum;
    case ReduceOp::AVG:
    case ReduceOp::PREMUL_SUM: return ccl::reduction::sum;
    case ReduceOp::PRODUCT: return boolean ? ccl::reduction::min : ccl::reduction::prod;
    case ReduceOp::MIN: return ccl::reduction::min;
    case ReduceOp::MAX: return ccl::reduction::max;
    default: TORCH_CHECK_VALUE(false, "ccl: unknown reduction ", static_cast<int>(op));
  }
}

std::atomic<int> next_kvs{1};

// oneCCL's log level; an internal of it, which the pinned static archive makes a fixed one.
extern "C" int oneccl_log_level __asm__("_ZN10ccl_logger5levelE");

// At its first level, `warn`, oneCCL would warn that the variable changes the level.
void initialize() {
  const char* level = std::getenv("CCL_LOG_LEVEL");
  if (level && std::string(level) == "error") oneccl_log_level = 0;
  ccl::init();
}

// The ranks' parts side by side in one buffer, as oneCCL takes them; `parts` themselves where they lie so.
at::Tensor side_by_side(CclWork& work, const Tensors& parts) {
  const auto* next = static_cast<const char*>(parts[0].data_ptr());
  int64_t count = 0;
  bool adjacent = true;
  for (const auto& part : parts) {
    adjacent = adjacent && (part.numel() == 0 || part.data_ptr() == next);
    next += part.nbytes();
    count += part.numel();
  }
  if (adjacent && parts[0].numel()) return at::from_blob(parts[0].data_ptr(), {count}, parts[0].options());
  auto joined = at::empty({count}, parts[0].options());
  work.keep(joined);
  return joined;
}

at::Tensor join_to_send(CclWork& work, const Tensors& parts) {
  auto joined = side_by_side(work, parts);
  if (joined.numel() && joined.data_ptr() == parts[0].data_ptr()) return joined;
  int64_t at = 0;
  for (const auto& part : parts) {
    joined.narrow(0, at, part.numel()).copy_(part.view({-1}));
    at += part.numel();
  }
  return joined;
}

// What comes there goes to `parts` when the operation is complete.
at::Tensor join_to_receive(CclWork& work, const Tensors& parts) {
  auto joined = side_by_side(work, parts);
  if (joined.numel() && joined.data_ptr() == parts[0].data_ptr()) return joined;
  work.afterwards([parts, joined] {
    int64_t at = 0;
    for (auto part : parts) {
      part.copy_(joined.narrow(0, at, part.numel()).view(part.sizes()));
      at += part.numel();
    }
  });
  return joined;
}

// The number of elements of each part.
std::vector<int64_t> counts_of(const Tensors& parts) {
  std::vector<int64_t> counts;
  for (const auto& part : parts) counts.push_back(part.numel());
  return counts;
}

ccl::vector_class<size_t> in_units(const std::vector<int64_t>& counts, const ElementType& element) {
  ccl::vector_class<size_t> units;
  for (const auto count : counts) units.push_back(count * element.per_element);
  return units;
}

ccl::vector_class<char> StoreKvs::get(const ccl::string_class& key) {
  if (!store_) return {};
  std::string value;
  // What was there once stays: oneCCL removes a value by writing an empty one.
  if (const auto known = seen_.find(key); (known != seen_.end() && !known->second.empty()) || store_->check({key})) {
    const auto bytes = store_->get(key);
    value.assign(bytes.begin(), bytes.end());
  }
  back_off_if_unchanged(key, value);
  return {value.begin(), value.end()};
}

// Once in a round over all ranks' keys, longer each time.
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
  if (store_) store_->set(key, std::vector<uint8_t>(data.begin(), data.end()));
}

// Other groups' operations stand still meanwhile.  They couldn't go on without the lock either: while the ranks tell
// each other their addresses, oneCCL 2022.2 has a spin lock on its table of addresses, which each send and each receive
// looks into (atl_ofi::get_rank2proc_map and atl_ofi_get_addr).  So whoever is late has been waited for before.
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

std::unique_ptr<ccl::communicator> connect_oneccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  auto kvs = std::make_shared<StoreKvs>(store, next_kvs++);
  auto communicator = make_communicator(kvs, rank, size);
  // As each rank sends a message to each other one, all of oneCCL's shared memory is mapped from here on.
  std::vector<char> from(size), to(size);
  const auto greeting = start_oneccl(
      [&] { return ccl::alltoall(from.data(), to.data(), 1, ccl::datatype::int8, *communicator); });
  while (!greeting->test()) std::this_thread::sleep_for(kMinBackoff);
  kvs->end();
  [[maybe_unused]] static const int registered = on_exit(end_forked_process, nullptr);  // runs before oneCCL's own
  return communicator;
}

// A communicator with operations in flight cannot be taken down, nor can one of a subset of the ranks on oneCCL's MPI
// transport (it hangs): those stay until the process ends.
void disconnect_oneccl(std::unique_ptr<ccl::communicator> communicator, bool in_flight) {
  const char* transport = std::getenv("CCL_ATL_TRANSPORT");
  if (in_flight || (transport && std::string(transport) == "mpi")) {
    static_cast<void>(communicator.release());
  } else {
    const auto inside = enter_oneccl();
    communicator.reset();
  }
}

std::unique_ptr<Transfer> start_oneccl(c10::function_ref<ccl::event()> call) {
  const auto inside = enter_oneccl();
  return std::make_unique<OneCclTransfer>(call());
}

void check_oneccl_reduction(c10::ScalarType type, Transport::Op op) {
  check_scaling(type, op);
  reduction_of(op, type);
  type_to_reduce(type, op);
}

OneCclTransport::Result OneCclTransport::all_reduce(CclWork& work, const at::Tensor& data, Op op, Wire) {
  if (data.numel() == 0) return done_at_once();
  divide_average(work, op, data, size_);
  const auto element = type_to_reduce(data.scalar_type(), op);
  const auto reduction = reduction_of(op, data.scalar_type());
  return start_oneccl([&] {
    return ccl::allreduce(data.data_ptr(), data.data_ptr(), element.count(data), element.type, reduction,
                          *communicator_);
  });
}

OneCclTransport::Result OneCclTransport::reduce(CclWork& work, const at::Tensor& from, const at::Tensor& to, Op op,
                                                int root) {
  if (from.numel() == 0) return done_at_once();
  if (rank_ == root) divide_average(work, op, to, size_);
  const auto element = type_to_reduce(from.scalar_type(), op);
  const auto reduction = reduction_of(op, from.scalar_type());
  return start_oneccl([&] {
    return ccl::reduce(from.data_ptr(), to.data_ptr(), element.count(from), element.type, reduction, root,
                       *communicator_);
  });
}

OneCclTransport::Result OneCclTransport::broadcast(CclWork&, const at::Tensor& data, int root) {
  if (data.numel() == 0) return done_at_once();
  const auto element = type_to_move(data);
  return start_oneccl(
      [&] { return ccl::broadcast(data.data_ptr(), element.count(data), element.type, root, *communicator_); });
}

// oneCCL's allgatherv to a list of buffers would block its caller until all ranks have come, where no time limit holds:
// of its algorithms only `flat` and `multi_bcast` take a list, and it makes these two synchronous.
OneCclTransport::Result OneCclTransport::all_gather(CclWork& work, const Tensors& outputs, const at::Tensor& input) {
  const auto to = join_to_receive(work, outputs);
  if (to.numel() == 0) return done_at_once();
  const auto element = type_to_move(input);
  const auto counts = in_units(counts_of(outputs), element);
  return start_oneccl([&] {
    return ccl::allgatherv(input.data_ptr(), counts[rank_], to.data_ptr(), counts, element.type, *communicator_);
  });
}

OneCclTransport::Result OneCclTransport::reduce_scatter(CclWork& work, const at::Tensor& output, const Tensors& inputs,
                                                        Op op) {
  const auto element = type_to_reduce(output.scalar_type(), op);
  const auto reduction = reduction_of(op, output.scalar_type());
  const auto same = [&](const at::Tensor& input) { return input.numel() == output.numel(); };
  if (std::all_of(inputs.begin(), inputs.end(), same)) {
    if (output.numel() == 0) return done_at_once();
    divide_average(work, op, output, size_);
    const auto from = join_to_send(work, inputs);
    return start_oneccl([&] {
      return ccl::reduce_scatter(from.data_ptr(), output.data_ptr(), element.count(output), element.type, reduction,
                                 *communicator_);
    });
  }
  auto all = std::make_unique<CombinedTransfer>();  // a reduction to each rank
  for (int rank = 0; rank < size_; ++rank) {
    if (inputs[rank].numel() == 0) continue;
    const auto to = rank == rank_ ? output : at::empty_like(inputs[rank]);
    work.keep(to);
    all->add(reduce(work, inputs[rank], to, op, rank));
  }
  return all;
}

OneCclTransport::Result OneCclTransport::exchange(const at::Tensor& to, const std::vector<int64_t>& received,
                                                  const at::Tensor& from, const std::vector<int64_t>& sent) {
  const auto element = type_to_move(to);
  return start_oneccl([&] {
    return ccl::alltoallv(from.data_ptr(), in_units(sent, element), to.data_ptr(), in_units(received, element),
                          element.type, *communicator_);
  });
}

OneCclTransport::Result OneCclTransport::all_to_all(CclWork& work, const Tensors& outputs, const Tensors& inputs) {
  return exchange(join_to_receive(work, outputs), counts_of(outputs), join_to_send(work, inputs), counts_of(inputs));
}

OneCclTransport::Result OneCclTransport::gather(CclWork& work, const Tensors& outputs, const at::Tensor& input,
                                                int root) {
  std::vector<int64_t> sent(size_), received(size_);
  sent[root] = input.numel();
  if (outputs.empty()) return exchange(at::empty({0}, input.options()), received, input, sent);
  return exchange(join_to_receive(work, outputs), counts_of(outputs), input, sent);
}

OneCclTransport::Result OneCclTransport::scatter(CclWork& work, const at::Tensor& output, const Tensors& inputs,
                                                 int root) {
  std::vector<int64_t> sent(size_), received(size_);
  received[root] = output.numel();
  if (inputs.empty()) return exchange(output, received, at::empty({0}, output.options()), sent);
  return exchange(output, received, join_to_send(work, inputs), counts_of(inputs));
}

}  // namespace cpulaunch
