// What the reductions have in common: torch's operators in terms of sums, and of what comes before and after them.

#pragma once

#include <iterator>

#include "work.hpp"

namespace cpulaunch {

// Those that oneCCL lacks.
inline bool is_bitwise(c10d::ReduceOp::RedOpType op) {
  using c10d::ReduceOp;
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

// As the ledger has it.
inline const char* name_of(const c10d::ReduceOp& op) {
  static constexpr const char* kNames[] = {"sum", "average",     "product",    "min",         "max",
                                           "bitwise and", "bitwise or", "bitwise xor", "sum"};  // scaled before
  const auto number = static_cast<size_t>(static_cast<c10d::ReduceOp::RedOpType>(op));
  return number < std::size(kNames) ? kNames[number] : "";
}

// A PREMUL_SUM is scaled before it is summed ...
inline void scale_before(const c10d::ReduceOp& op, at::Tensor& data) {
  if (op != c10d::ReduceOp::PREMUL_SUM) return;
  const auto* supplement = reinterpret_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement, "ccl: PREMUL_SUM without its factor");
  if (supplement->tensor_factor.defined()) {
    data.mul_(supplement->tensor_factor);
  } else {
    data.mul_(supplement->double_factor);
  }
}

template <class Number>
void divide_numbers(at::Tensor& data, int size) {  // of unsigned types, which torch doesn't divide
  auto* numbers = static_cast<Number*>(data.data_ptr());
  for (int64_t i = 0; i < data.numel(); ++i) numbers[i] /= size;
}

inline void divide(at::Tensor& data, int size) {
  switch (data.scalar_type()) {
    case at::kUInt16: return divide_numbers<uint16_t>(data, size);
    case at::kUInt32: return divide_numbers<uint32_t>(data, size);
    case at::kUInt64: return divide_numbers<uint64_t>(data, size);
    default: break;
  }
  if (at::isIntegralType(data.scalar_type(), /*includeBool=*/false)) {
    data.div_(size, "trunc");
  } else {
    data.div_(size);
  }
}

// ... and an average is divided after it, where the transport has sums only: `data` is where the sum arrives.
inline void divide_average(CclWork& work, c10d::ReduceOp::RedOpType op, at::Tensor data, int size) {
  if (op == c10d::ReduceOp::AVG) work.afterwards([data, size]() mutable { divide(data, size); });
}

// Throws ValueError where the numbers have no such reduction.
inline void check_scaling(c10::ScalarType type, c10d::ReduceOp::RedOpType op) {
  TORCH_CHECK_VALUE(type != at::kBool || op != c10d::ReduceOp::AVG, "ccl: bool tensors have no average");
  const bool scales = c10::isFloatingType(type) || c10::isComplexType(type);
  TORCH_CHECK_VALUE(scales || op != c10d::ReduceOp::PREMUL_SUM, "ccl: tensors of type ", type, " have no scaled sum");
}

// What a rank sends into a reduction whose result goes elsewhere: `tensor`, or a scaled copy of it.
inline at::Tensor to_reduce(CclWork& work, const c10d::ReduceOp& op, at::Tensor data) {
  if (op != c10d::ReduceOp::PREMUL_SUM) return data;
  data = data.clone();
  scale_before(op, data);
  work.keep(data);
  return data;
}

}  // namespace cpulaunch
