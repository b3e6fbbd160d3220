#include "transport_oneccl.hpp"

#include <algorithm>
#include <thread>

namespace cpulaunch {

namespace {

// The sleep after a round of queries in vain: at first about what a query takes, then longer, up to a time that adds
// little to making a group (some 10 ms).
constexpr auto kMinBackoff = std::chrono::microseconds(50);
constexpr auto kMaxBackoff = std::chrono::microseconds(2000);

}  // namespace

std::unique_lock<std::mutex> enter_oneccl() {
  static auto* mutex = new std::mutex;  // never destroyed: background threads may outlive static objects
  return std::unique_lock<std::mutex>(*mutex);
}

bool OneCclTransfer::test() {
  if (done_.load(std::memory_order_acquire)) return true;
  const auto inside = enter_oneccl();
  if (done_.load(std::memory_order_acquire)) return true;
  if (aborted_.load(std::memory_order_acquire) || !event_->test()) return false;
  event_.reset();
  done_.store(true, std::memory_order_release);
  return true;
}

ccl::vector_class<char> StoreKvs::get(const ccl::string_class& key) {
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
  try {
    store_->set(key, std::vector<uint8_t>(data.begin(), data.end()));
  } catch (const std::exception&) {
    // oneCCL writes once more while it is torn down, when rank 0's store may be gone.  While a group is
    // made, a lost store shows at the next get().
  }
}

ElementType type_to_move(const at::Tensor& tensor) {
  const size_t bytes = tensor.element_size();
  if (bytes % 8 == 0) return {ccl::datatype::int64, bytes / 8};
  if (bytes % 4 == 0) return {ccl::datatype::int32, bytes / 4};
  if (bytes % 2 == 0) return {ccl::datatype::int16, bytes / 2};
  return {ccl::datatype::int8, bytes};
}

ElementType type_to_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
  using c10d::ReduceOp;
  switch (tensor.scalar_type()) {
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
      return {tensor.scalar_type() == at::kComplexFloat ? ccl::datatype::float32 : ccl::datatype::float64, 2};
    default: TORCH_CHECK_TYPE(false, "ccl: cannot reduce tensors of type ", tensor.scalar_type());
  }
}

ccl::reduction reduction_of(c10d::ReduceOp::RedOpType op, c10::ScalarType type) {
  using c10d::ReduceOp;
  // A bool is a byte of 0 or 1 that has to stay one.
  const bool boolean = type == at::kBool;
  switch (op) {
    case ReduceOp::SUM: return boolean ? ccl::reduction::max : ccl::reduction::sum;
    case ReduceOp::AVG:
    case ReduceOp::PREMUL_SUM:
      TORCH_CHECK_VALUE(!boolean, "ccl: bool tensors have no average and no scaled sum");
      return ccl::reduction::sum;  // scaled before or after
    case ReduceOp::PRODUCT: return boolean ? ccl::reduction::min : ccl::reduction::prod;
    case ReduceOp::MIN: return ccl::reduction::min;
    case ReduceOp::MAX: return ccl::reduction::max;
    default: TORCH_CHECK_VALUE(false, "ccl: unknown reduction ", static_cast<int>(op));
  }
}

}  // namespace cpulaunch
