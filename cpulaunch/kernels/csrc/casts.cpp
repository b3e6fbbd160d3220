// Casts from bf16 to fp32 for tensors that are larger than the caches, such as logits or the gradient of an embedding.
// The stores bypass the caches.  torch's stores first read each line from memory, only to overwrite it.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_native.h>

#include "plain.hpp"

namespace cpulaunch::kernels {
namespace {

using at::Tensor;
constexpr int64_t least = 8 << 20;  // elements

bool is_large_cast(const Tensor& to, const Tensor& from) {
  return to.scalar_type() == at::kFloat && from.scalar_type() == at::kBFloat16 && to.numel() >= least &&
         is_dense(from) && is_dense(to) && to.sizes() == from.sizes() && to.is_contiguous() && from.is_contiguous();
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!is_large_cast(to, from)) return at::native::copy_(to, from, non_blocking);
  note(Operation::casts);
  const auto* source = static_cast<const uint16_t*>(from.const_data_ptr());
  float* target = to.mutable_data_ptr<float>();
  at::parallel_for(0, to.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
    vector().widen(source + begin, target + begin, end - begin);
  });
  return to;
}

}  // namespace

void replace_casts(torch::Library& aten) { aten.impl("copy_", copy_); }

}  // namespace cpulaunch::kernels
