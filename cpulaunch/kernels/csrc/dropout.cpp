// Dropout in one pass.  Nothing of a mask is stored: backward makes it again, from the seed.
#include "dropout.hpp"

#include <tuple>

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/dropout_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "plain.hpp"

namespace cpulaunch::kernels {

std::atomic<bool> dropout_replaced{false};

at::Tensor call_replay(const at::Tensor& input, const at::Tensor& seed, double p) {
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("cpulaunch::dropout_replay", "")
                                    .typed<at::Tensor(const at::Tensor&, const at::Tensor&, double)>();
  return operation.call(input, seed, p);
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Drawn = std::tuple<Tensor, Tensor>;  // what is left of an input, and the seed

constexpr int64_t grain = 1024;  // blocks that are worth a thread

Drawn call_dropout(const Tensor& input, double p) {
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("cpulaunch::dropout", "")
                                    .typed<Drawn(const Tensor&, double)>();
  return operation.call(input, p);
}

void check(const Tensor& input, double p) {
  TORCH_CHECK(p > 0 && p < 1, "cpulaunch::dropout: p must be between 0 and 1, got ", p);
  TORCH_CHECK(input.scalar_type() == at::kFloat || input.scalar_type() == at::kBFloat16,
              "cpulaunch::dropout: the input must be float32 or bfloat16, got ", input.scalar_type());
}

Tensor masked(const Tensor& input, uint64_t seed, double p) {
  check(input, p);
  const Tensor from = input.contiguous(), to = at::empty_like(from);
  const Mask mask = Mask::of(seed, p);
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

Drawn dropout(const Tensor& input, double p) {
  Tensor seed = at::empty({1}, input.options().dtype(at::kLong));
  *seed.mutable_data_ptr<int64_t>() = draw_seed();
  return {masked(input, *seed.const_data_ptr<int64_t>(), p), seed};
}

Tensor replay(const Tensor& input, const Tensor& seed, double p) {
  TORCH_CHECK(seed.scalar_type() == at::kLong && seed.numel() == 1,
              "cpulaunch::dropout_replay: the seed must be one int64");
  return masked(input, *seed.const_data_ptr<int64_t>(), p);
}

Drawn dropout_meta(const Tensor& input, double p) {
  check(input, p);
  return {at::empty_like(input, input.options(), at::MemoryFormat::Contiguous),
          at::empty({1}, input.options().dtype(at::kLong))};
}

Tensor replay_meta(const Tensor& input, const Tensor& seed, double p) {
  check(input, p);
  return at::empty_like(input, input.options(), at::MemoryFormat::Contiguous);
}

// Linear in its input, so its derivatives of every order are the same operation.
struct Replay : Function<Replay> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& seed, double p) {
    context->save_for_backward({seed});
    context->saved_data["p"] = p;
    at::AutoDispatchBelowADInplaceOrView below;
    return call_replay(input, seed, p);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {call_replay(gradients[0], context->get_saved_variables()[0], context->saved_data["p"].toDouble()),
            Tensor(), Tensor()};
  }
};

struct Dropout : Function<Dropout> {
  static variable_list forward(AutogradContext* context, const Tensor& input, double p) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, seed] = call_dropout(input, p);
    context->save_for_backward({seed});
    context->saved_data["p"] = p;
    context->mark_non_differentiable({seed});
    return {output, seed};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {call_replay(gradients[0], context->get_saved_variables()[0], context->saved_data["p"].toDouble()),
            Tensor()};
  }
};

Drawn dropout_autograd(const Tensor& input, double p) {
  auto made = Dropout::apply(input, p);
  return {made[0], made[1]};
}

Tensor replay_autograd(const Tensor& input, const Tensor& seed, double p) {
  return Replay::apply(input, seed, p);
}

// In place of aten::dropout.
Tensor aten_dropout(const Tensor& input, double p, bool train) {
  if (!in_use || !train || !(p > 0 && p < 1) || !is_plain(input) || !input.is_contiguous())
    return at::native::dropout(input, p, train);
  dropout_replaced = true;
  return std::get<0>(call_dropout(input, p));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cpulaunch, library) {
  // A random operation: torch.compile neither merges two calls nor computes one again in backward.
  library.def("dropout(Tensor input, float p) -> (Tensor, Tensor)",
              {at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag});
  library.def("dropout_replay(Tensor input, Tensor seed, float p) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(cpulaunch, CPU, library) {
  library.impl("dropout", dropout);
  library.impl("dropout_replay", replay);
}

TORCH_LIBRARY_IMPL(cpulaunch, Meta, library) {
  library.impl("dropout", dropout_meta);
  library.impl("dropout_replay", replay_meta);
}

TORCH_LIBRARY_IMPL(cpulaunch, Autograd, library) {
  library.impl("dropout", dropout_autograd);
  library.impl("dropout_replay", replay_autograd);
}

// Transforms of functions know how to draw for torch's own: one mask for a batch, or one for each of its elements.
Drawn dropout_transformed(const Tensor& input, double p) {
  return {at::dropout(input, p, true), at::zeros({1}, at::kLong)};
}

TORCH_LIBRARY_IMPL(cpulaunch, FuncTorchDynamicLayerFrontMode, library) {
  library.impl("dropout", dropout_transformed);
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { library.impl("dropout", aten_dropout); }

}  // namespace cpulaunch::kernels
