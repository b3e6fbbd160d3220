// What the reductions have in common: torch's operators in terms of sums, and of what comes before and after them.

#pragma once

#include <iterator>

#include "arithmetic.hpp"
#include "work.hpp"

namespace cpulaunch {

// A complex number is reduced as two of its parts.  Throws TypeError where numbers of a type can't be reduced.
inline NumberType number_type_of(c10::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kComplexFloat: return NumberType::float32;
    case at::kDouble:
    case at::kComplexDouble: return NumberType::float64;
    case at::kHalf:
    case at::kComplexHalf: return NumberType::float16;
    case at::kBFloat16: return NumberType::bfloat16;
    case at::kLong: return NumberType::int64;
    case at::kInt: return NumberType::int32;
    case at::kShort: return NumberType::int16;
    case at::kChar: return NumberType::int8;
    case at::kByte: return NumberType::uint8;
    case at::kBool: return NumberType::boolean;
    case at::kUInt16: return NumberType::uint16;
    case at::kUInt32: return NumberType::uint32;
    case at::kUInt64: return NumberType::uint64;
    default: TORCH_CHECK_TYPE(false, "ccl: cannot reduce tensors of type ", type);
  }
}

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

// ... and an average is divided after it, where the transport has sums only: `data` is where the sum arrives.
inline void divide_average(CclWork& work, c10d::ReduceOp::RedOpType op, at::Tensor data, int size) {
  if (op != c10d::ReduceOp::AVG) return;
  const auto type = number_type_of(data.scalar_type());
  work.afterwards([=] { divide(static_cast<char*>(data.data_ptr()), data.nbytes(), type, size); });
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
