// Tensors as oneCCL takes them: contiguous host memory, with a copy where a tensor is not that.

#pragma once

#include "operation.hpp"

namespace cpulaunch {

inline void check_tensor(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "ccl: tensors must be on the CPU, not on ", tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "ccl: this operation does not take sparse tensors");
}

inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

inline at::Tensor to_send(Operation& operation, const at::Tensor& tensor) {
  check_tensor(tensor);
  auto data = is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
  operation.keep(data);
  return data;
}

// Memory whose content goes to `tensor` when the operation is complete.
inline at::Tensor to_receive(Operation& operation, const at::Tensor& tensor) {
  check_tensor(tensor);
  if (is_plain(tensor)) {
    operation.keep(tensor);
    return tensor;
  }
  auto data = at::empty(tensor.sizes(), tensor.options(), at::MemoryFormat::Contiguous);
  operation.keep(data);
  operation.afterwards([tensor, data]() mutable { tensor.copy_(data); });
  return data;
}

// The same memory for what is sent and what comes back.
inline at::Tensor to_exchange(Operation& operation, const at::Tensor& tensor) {
  auto data = to_receive(operation, tensor);
  if (!data.is_same(tensor)) data.copy_(tensor);
  return data;
}

// `input`, or a copy of it where the two share memory.
inline at::Tensor apart_from(Operation& operation, const at::Tensor& output, const at::Tensor& input) {
  if (!output.is_alias_of(input)) return input;
  auto copy = input.clone();
  operation.keep(copy);
  return copy;
}

}  // namespace cpulaunch
