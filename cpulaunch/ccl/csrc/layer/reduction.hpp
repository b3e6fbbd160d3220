// Shared by the reductions: translates torch's types and operators into the core's, and scales a PREMUL_SUM's input.

#pragma once

#include "collective.hpp"
#include "transport.hpp"
#include "work.hpp"

namespace cpulaunch {

// A complex number is reduced as two real numbers.  Throws TypeError if numbers of this type can't be reduced.
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

// A PREMUL_SUM is a sum: its input is scaled beforehand.
inline Reduction reduction_of(c10d::ReduceOp::RedOpType op) {
  using c10d::ReduceOp;
  switch (op) {
    case ReduceOp::AVG: return Reduction::average;
    case ReduceOp::SUM:
    case ReduceOp::PREMUL_SUM: return Reduction::sum;
    case ReduceOp::PRODUCT: return Reduction::product;
    case ReduceOp::MIN: return Reduction::min;
    case ReduceOp::MAX: return Reduction::max;
    case ReduceOp::BAND: return Reduction::bit_and;
    case ReduceOp::BOR: return Reduction::bit_or;
    case ReduceOp::BXOR: return Reduction::bit_xor;
    default: TORCH_CHECK_VALUE(false, "ccl: unknown reduction ", static_cast<int>(op));
  }
}

// The reduction's name in the ledger; "" if `op` is no reduction.
inline const char* name_of(const c10d::ReduceOp& op) {
  const c10d::ReduceOp::RedOpType type = op;
  return type < c10d::ReduceOp::UNUSED ? name_of(reduction_of(type)) : "";
}

// Scales the input of a PREMUL_SUM in place; does nothing for other reductions.
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

// Throws TypeError if numbers of this type can't be reduced, and ValueError if they can't be reduced by `op`.
inline void check_reduction(c10::ScalarType type, c10d::ReduceOp::RedOpType op) {
  const auto number = number_type_of(type);
  const auto reduction = reduction_of(op);
  TORCH_CHECK_VALUE(type != at::kBool || op != c10d::ReduceOp::AVG, "ccl: bool tensors have no average");
  const bool scales = c10::isFloatingType(type) || c10::isComplexType(type);
  TORCH_CHECK_VALUE(scales || op != c10d::ReduceOp::PREMUL_SUM, "ccl: tensors of type ", type, " have no scaled sum");
  TORCH_CHECK_VALUE(!c10::isComplexType(type) || reduction == Reduction::sum || reduction == Reduction::average,
                    "ccl: complex tensors can be reduced with SUM and AVG only");
  TORCH_CHECK_VALUE(has_reduction(number, reduction), "ccl: tensors of type ", type, " have no ", name_of(reduction));
}

// A reduction of tensors like `model`.  The caller fills in the parts.
inline Collective reduction(Kind kind, const at::Tensor& model, const c10d::ReduceOp& op) {
  Collective collective{kind};
  collective.type = number_type_of(model.scalar_type());
  collective.reduction = reduction_of(op);
  return collective;
}

// Returns the input of a reduction that is not in place: `data`, or a scaled copy of it for a PREMUL_SUM.
inline at::Tensor to_reduce(CclWork& work, const c10d::ReduceOp& op, at::Tensor data) {
  if (op != c10d::ReduceOp::PREMUL_SUM) return data;
  data = data.clone();
  scale_before(op, data);
  work.keep(data);
  return data;
}

}  // namespace cpulaunch
