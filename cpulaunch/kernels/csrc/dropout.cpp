// Dropout in one pass.  No mask is stored: backward computes it again from the seed.
#include "dropout.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/dropout_native.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "plain.hpp"

namespace cpulaunch::kernels {

at::Tensor call_dropout(const at::Tensor& input, const at::Tensor& seed, double p) {
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("cpulaunch::dropout", "")
                                    .typed<at::Tensor(const at::Tensor&, const at::Tensor&, double)>();
  return operation.call(input, seed, p);
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
constexpr int64_t grain = 1024;  // the fewest blocks that are worth a thread

void check(const Tensor& input, double p) {
  TORCH_CHECK(p > 0 && p < 1, "cpulaunch::dropout: p must be between 0 and 1, got ", p);
  TORCH_CHECK(input.scalar_type() == at::kFloat || input.scalar_type() == at::kBFloat16,
              "cpulaunch::dropout: the input must be float32 or bfloat16, got ", input.scalar_type());
}

Tensor dropout(const Tensor& input, const Tensor& seed, double p) {
  check(input, p);
  TORCH_CHECK(seed.scalar_type() == at::kLong && seed.numel() == 1, "cpulaunch::dropout: the seed must be one int64");
  const Tensor from = input.contiguous(), to = at::empty_like(from);
  const Mask mask = Mask::of(*seed.const_data_ptr<int64_t>(), p);
  const int64_t size = from.numel(), blocks = (size + block_size - 1) / block_size;
  at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    if (from.scalar_type() == at::kFloat)
      vector().dropout_float(from.const_data_ptr<float>(), to.mutable_data_ptr<float>(), begin, end, size, mask);
    else
      vector().dropout_bfloat16(static_cast<const uint16_t*>(from.const_data_ptr()),
                                static_cast<uint16_t*>(to.mutable_data_ptr()), begin, end, size, mask);
  });
  return to;
}

Tensor dropout_meta(const Tensor& input, const Tensor& seed, double p) {
  check(input, p);
  return at::empty_like(input, input.options(), at::MemoryFormat::Contiguous);
}

// Dropout is linear in its input, so its derivatives of every order are the same operation.
struct Dropout : Function<Dropout> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& seed, double p) {
    context->save_for_backward({seed});
    context->saved_data["p"] = p;
    at::AutoDispatchBelowADInplaceOrView below;
    return call_dropout(input, seed, p);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {call_dropout(gradients[0], context->get_saved_variables()[0], context->saved_data["p"].toDouble()),
            Tensor(), Tensor()};
  }
};

Tensor dropout_autograd(const Tensor& input, const Tensor& seed, double p) {
  return Dropout::apply(input, seed, p);
}

// Replaces aten::dropout.
Tensor aten_dropout(const Tensor& input, double p, bool train) {
  if (!in_use || !train || !(p > 0 && p < 1) || !is_plain(input) || !input.is_contiguous())
    return at::native::dropout(input, p, train);
  note(Operation::dropout);
  return call_dropout(input, draw_seed(), p);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cpulaunch, library) {
  library.def("dropout(Tensor input, Tensor seed, float p) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(cpulaunch, CPU, library) { library.impl("dropout", dropout); }

TORCH_LIBRARY_IMPL(cpulaunch, Meta, library) { library.impl("dropout", dropout_meta); }

TORCH_LIBRARY_IMPL(cpulaunch, Autograd, library) { library.impl("dropout", dropout_autograd); }

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { library.impl("dropout", aten_dropout); }

}  // namespace cpulaunch::kernels
