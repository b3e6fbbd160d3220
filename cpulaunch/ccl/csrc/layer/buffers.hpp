// Prepares tensors for transports, which need contiguous host memory: other tensors are copied.  Also checks a
// collective's arguments, mostly with c10d's own functions.

#pragma once

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "collective.hpp"
#include "work.hpp"

namespace cpulaunch {

using Tensors = std::vector<at::Tensor>;

// The error callback of c10d's checks: throws ValueError with their message.
struct Invalid {
  const char* operation;

  void operator()(const std::string& message) const { TORCH_CHECK_VALUE(false, "ccl ", operation, ": ", message); }
};

inline at::Tensor& single(const Invalid& invalid, Tensors& tensors) {
  c10d::assertSingleElement(invalid, tensors);
  return tensors[0];
}

inline void check_tensor(const Invalid& invalid, const at::Tensor& tensor) {
  c10d::assertDense(invalid, tensor);
  c10d::assertCPU(invalid, tensor);
}

// Checks that all tensors are dense, on the host, and of the type of `model`.
inline void check_tensors(const Invalid& invalid, const Tensors& tensors, const at::Tensor& model) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_tensor(invalid, tensors[i]);
    c10d::assertTypeMatch(invalid, model.options(), tensors, i);
  }
}

// Checks that there is one tensor for each rank, and that all are of the type of `model`.
inline void check_list(const Invalid& invalid, const Tensors& tensors, int size, const at::Tensor& model) {
  if (static_cast<int>(tensors.size()) != size) {
    invalid(c10::str("expected a list of ", size, " tensors, one for each rank, got ", tensors.size()));
  }
  check_tensors(invalid, tensors, model);
}

inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Returns the tensor, or a contiguous copy with its conjugation and negation carried out.
inline at::Tensor to_send(CclWork& work, const at::Tensor& tensor) {
  auto data = is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
  work.keep(data);
  return data;
}

// Returns memory for the result: `tensor` itself, or a buffer that is copied to it once the operation is complete.
inline at::Tensor to_receive(CclWork& work, const at::Tensor& tensor) {
  if (is_plain(tensor)) {
    work.keep(tensor);
    return tensor;
  }
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    "ccl: elements of this tensor share memory, so that it can't be written to; clone() it");
  auto data = at::empty(tensor.sizes(), tensor.options(), at::MemoryFormat::Contiguous);
  work.keep(data);
  work.afterwards([tensor, data]() mutable { tensor.copy_(data); });
  return data;
}

// Returns memory for an operation in place: it holds the tensor's data now, and the result later.
inline at::Tensor to_exchange(CclWork& work, const at::Tensor& tensor) {
  auto data = to_receive(work, tensor);
  if (!data.is_same(tensor)) data.copy_(tensor);
  return data;
}

// Returns `input`, or a copy of `input` if it shares memory with `output`.
inline at::Tensor apart_from(CclWork& work, const at::Tensor& output, const at::Tensor& input) {
  if (!output.is_alias_of(input)) return input;
  auto copy = input.clone();
  work.keep(copy);
  return copy;
}

// A tensor's memory.  An empty tensor may have a null pointer, but that would mean that no message is sent at all.  The
// other rank must learn that this tensor is empty, so another address takes the pointer's place.
inline Part part_of(const at::Tensor& tensor) {
  static char nothing;
  return {tensor.numel() ? static_cast<char*>(tensor.data_ptr()) : &nothing, tensor.nbytes()};
}

inline Parts parts_of(const Tensors& tensors) {
  Parts parts;
  for (const auto& tensor : tensors) parts.push_back(part_of(tensor));
  return parts;
}

// Splits a buffer into adjacent parts, one for each rank, of `counts` elements.
inline Parts split_buffer(const at::Tensor& buffer, const std::vector<int64_t>& counts) {
  Parts parts;
  auto* next = part_of(buffer).data;
  for (const auto count : counts) {
    const auto bytes = static_cast<size_t>(count) * buffer.element_size();
    parts.push_back({next, bytes});
    next += bytes;
  }
  return parts;
}

inline Tensors to_send(CclWork& work, const Tensors& tensors) {
  Tensors plain;
  for (const auto& tensor : tensors) plain.push_back(to_send(work, tensor));
  return plain;
}

inline Tensors to_receive(CclWork& work, const Tensors& tensors) {
  Tensors plain;
  for (const auto& tensor : tensors) plain.push_back(to_receive(work, tensor));
  return plain;
}

}  // namespace cpulaunch
