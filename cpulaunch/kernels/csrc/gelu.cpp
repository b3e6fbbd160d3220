// gelu with tanh, and its gradient.  The exact gelu, with erf, is left to torch, which is as fast.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu_backward_cpu_dispatch.h>
#include <ATen/ops/gelu_cpu_dispatch.h>

#include "plain.hpp"

namespace cpulaunch::kernels {
namespace {

using at::Tensor;
constexpr int64_t elements_of_thread = 1 << 14;  // the fewest elements that are worth a thread

bool is_supported(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return (type == at::kFloat || type == at::kBFloat16) && tensor.is_contiguous() && tensor.numel() > 0;
}

Tensor gelu(const Tensor& input, c10::string_view approximate) {
  if (approximate != "tanh" || !is_supported(input)) return at::cpu::gelu(input, approximate);
  note(Operation::gelu);
  Tensor output = at::empty_like(input);
  const void* from = input.const_data_ptr();
  void* to = output.mutable_data_ptr();
  at::parallel_for(0, input.numel(), elements_of_thread, [&](int64_t begin, int64_t end) {
    if (input.scalar_type() == at::kFloat)
      vector().gelu_float(static_cast<const float*>(from) + begin, static_cast<float*>(to) + begin, end - begin);
    else
      vector().gelu_bfloat16(static_cast<const uint16_t*>(from) + begin, static_cast<uint16_t*>(to) + begin,
                             end - begin);
  });
  return output;
}

Tensor gelu_backward(const Tensor& gradient, const Tensor& input, c10::string_view approximate) {
  const bool supported = is_supported(gradient) && is_supported(input) && gradient.sizes() == input.sizes() &&
                     gradient.scalar_type() == input.scalar_type();
  if (approximate != "tanh" || !supported) return at::cpu::gelu_backward(gradient, input, approximate);
  note(Operation::gelu);
  Tensor output = at::empty_like(input);
  const void *factor = gradient.const_data_ptr(), *from = input.const_data_ptr();
  void* to = output.mutable_data_ptr();
  at::parallel_for(0, input.numel(), elements_of_thread, [&](int64_t begin, int64_t end) {
    if (input.scalar_type() == at::kFloat)
      vector().gelu_backward_float(static_cast<const float*>(factor) + begin,
                                   static_cast<const float*>(from) + begin, static_cast<float*>(to) + begin,
                                   end - begin);
    else
      vector().gelu_backward_bfloat16(static_cast<const uint16_t*>(factor) + begin,
                                      static_cast<const uint16_t*>(from) + begin,
                                      static_cast<uint16_t*>(to) + begin, end - begin);
  });
  return output;
}

}  // namespace

void replace_gelu(torch::Library& aten) {
  aten.impl("gelu", gelu);
  aten.impl("gelu_backward", gelu_backward);
}

}  // namespace cpulaunch::kernels
