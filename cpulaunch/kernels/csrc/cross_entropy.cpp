// Cross entropy with class indices, computed in fp32.  Backward computes the gradient from the logits in one pass.  So,
// unlike in torch, no tensor holds the logarithms of all probabilities, nor a gradient with respect to them, which is
// mostly zeros.  Under autocast, logits in bf16 are read as they are, whereas torch copies them to fp32 first.
#include <cmath>
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cross_entropy_loss_native.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "plain.hpp"

namespace cpulaunch::kernels {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Losses = std::tuple<Tensor, Tensor>;  // the loss and the Softmax of each row

constexpr int64_t least_classes = 256;  // with fewer, the calls take longer than the loops

void check(const Tensor& logits, const Tensor& target) {
  const auto type = logits.scalar_type();
  TORCH_CHECK(logits.dim() == 2 && (type == at::kFloat || type == at::kBFloat16),
              "cpulaunch::cross_entropy: logits must be a matrix of float32 or bfloat16");
  TORCH_CHECK(target.dim() == 1 && target.scalar_type() == at::kLong && target.sym_size(0) == logits.sym_size(0),
              "cpulaunch::cross_entropy: the target must have an int64 for each row of logits");
}

Softmax softmax_of(const float* row, int64_t width) { return vector().softmax_of_float(row, width); }

Softmax softmax_of(const at::BFloat16* row, int64_t width) {
  return vector().softmax_of_bfloat16(bits(row), width);
}

void probabilities(const float* row, Softmax softmax, float factor, int64_t chosen, float* to, int64_t width) {
  vector().probabilities_float(row, softmax, factor, chosen, to, width);
}

void probabilities(const at::BFloat16* row, Softmax softmax, float factor, int64_t chosen, at::BFloat16* to,
                   int64_t width) {
  vector().probabilities_bfloat16(bits(row), softmax, factor, chosen, bits(to), width);
}

template <typename T>
void compute_losses(const Tensor& logits, const Tensor& classes, int64_t ignored, float* losses, float* softmaxes) {
  const int64_t width = logits.size(1);
  at::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* logit = logits.const_data_ptr<T>() + row * width;
      const int64_t chosen = classes.const_data_ptr<int64_t>()[row];
      TORCH_CHECK_INDEX(chosen == ignored || (chosen >= 0 && chosen < width), "Target ", chosen,
                        " is out of bounds.");
      const Softmax softmax = chosen == ignored ? Softmax{0, 1} : softmax_of(logit, width);
      softmaxes[2 * row] = softmax.largest;
      softmaxes[2 * row + 1] = softmax.sum;
      losses[row] = chosen == ignored ? 0 : std::log(softmax.sum) - (float(logit[chosen]) - softmax.largest);
    }
  });
}

Losses cross_entropy(const Tensor& logits, const Tensor& target, int64_t ignored) {
  check(logits, target);
  const Tensor from = logits.contiguous(), classes = target.contiguous();
  const auto options = from.options().dtype(at::kFloat);
  Tensor losses = at::empty({from.size(0)}, options), softmaxes = at::empty({from.size(0), 2}, options);
  const auto run = from.scalar_type() == at::kFloat ? compute_losses<float> : compute_losses<at::BFloat16>;
  run(from, classes, ignored, losses.mutable_data_ptr<float>(), softmaxes.mutable_data_ptr<float>());
  return {losses, softmaxes};
}

template <typename T>
void compute_gradient(const float* factors, const Tensor& logits, const Tensor& classes, const float* softmaxes,
                      int64_t ignored, const Tensor& result) {
  const int64_t width = logits.size(1);
  at::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* to = result.mutable_data_ptr<T>() + row * width;
      const int64_t chosen = classes.const_data_ptr<int64_t>()[row];
      const Softmax softmax = {softmaxes[2 * row], softmaxes[2 * row + 1]};
      if (chosen == ignored)
        std::fill_n(to, width, T(0));
      else
        probabilities(logits.const_data_ptr<T>() + row * width, softmax, factors[row], chosen, to, width);
    }
  });
}

Tensor cross_entropy_backward(const Tensor& gradient, const Tensor& logits, const Tensor& target,
                              const Tensor& softmaxes, int64_t ignored) {
  check(logits, target);
  const Tensor from = logits.contiguous(), classes = target.contiguous(), factors = gradient.contiguous();
  Tensor result = at::empty(from.sizes(), from.options());
  const auto run = from.scalar_type() == at::kFloat ? compute_gradient<float> : compute_gradient<at::BFloat16>;
  run(factors.const_data_ptr<float>(), from, classes, softmaxes.const_data_ptr<float>(), ignored, result);
  return result;
}

Losses cross_entropy_meta(const Tensor& logits, const Tensor& target, int64_t) {
  check(logits, target);
  const auto options = logits.options().dtype(at::kFloat);
  return {at::empty_symint({logits.sym_size(0)}, options), at::empty_symint({logits.sym_size(0), 2}, options)};
}

Tensor cross_entropy_backward_meta(const Tensor&, const Tensor& logits, const Tensor&, const Tensor&, int64_t) {
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

Losses call_cross_entropy(const Tensor& logits, const Tensor& target, int64_t ignored) {
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("cpulaunch::cross_entropy", "")
                                    .typed<decltype(cross_entropy)>();
  return operation.call(logits, target, ignored);
}

Tensor call_backward(const Tensor& gradient, const Tensor& logits, const Tensor& target, const Tensor& softmaxes,
                     int64_t ignored) {
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("cpulaunch::cross_entropy_backward", "")
                                    .typed<decltype(cross_entropy_backward)>();
  return operation.call(gradient, logits, target, softmaxes, ignored);
}

struct CrossEntropy : Function<CrossEntropy> {
  static variable_list forward(AutogradContext* context, const Tensor& logits, const Tensor& target,
                               int64_t ignored) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [losses, softmaxes] = call_cross_entropy(logits, target, ignored);
    context->save_for_backward({logits, target, softmaxes});
    context->saved_data["ignored"] = ignored;
    context->mark_non_differentiable({softmaxes});
    return {losses, softmaxes};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &logits = saved[0], &target = saved[1], &softmaxes = saved[2];
    const int64_t ignored = context->saved_data["ignored"].toInt();
    if (!at::GradMode::is_enabled())
      return {call_backward(gradients[0], logits, target, softmaxes, ignored), Tensor(), Tensor()};
    const Tensor counts = target.ne(ignored);  // torch's operations: the program needs derivatives of this derivative
    const Tensor chosen = at::one_hot(at::where(counts, target, 0), logits.size(1));
    const Tensor slopes = at::softmax(logits, 1, at::kFloat) - chosen;
    const Tensor result = slopes * at::where(counts, gradients[0], 0).unsqueeze(1);
    return {result.to(logits.scalar_type()), Tensor(), Tensor()};
  }
};

Losses cross_entropy_autograd(const Tensor& logits, const Tensor& target, int64_t ignored) {
  auto made = CrossEntropy::apply(logits, target, ignored);
  return {made[0], made[1]};
}

bool is_supported(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& weight, double smoothing) {
  if (!in_use || (weight.has_value() && weight->defined()) || smoothing != 0) return false;
  return is_plain(logits) && is_dense(target) && logits.dim() == 2 && logits.is_contiguous() &&
         target.scalar_type() == at::kLong && target.dim() == 1 && target.size(0) == logits.size(0) &&
         logits.size(1) >= least_classes;
}

Tensor reduced(const Tensor& logits, const Tensor& target, int64_t reduction, int64_t ignored) {
  note(Operation::cross_entropy);
  const Tensor losses = std::get<0>(call_cross_entropy(logits, target, ignored));
  if (reduction == at::Reduction::None) return losses;
  const Tensor sum = losses.sum();
  return reduction == at::Reduction::Sum ? sum : sum / target.ne(ignored).sum();
}

// Replaces aten::cross_entropy_loss.
Tensor aten_cross_entropy(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& weight,
                          int64_t reduction, c10::SymInt ignored, double smoothing) {
  if (logits.scalar_type() != at::kFloat || !is_supported(logits, target, weight, smoothing))
    return at::native::cross_entropy_loss_symint(logits, target, weight, reduction, ignored, smoothing);
  return reduced(logits, target, reduction, ignored.expect_int());
}

// Replaces autocast's aten::cross_entropy_loss, which casts to fp32.
Tensor autocast_cross_entropy(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& weight,
                              int64_t reduction, c10::SymInt ignored, double smoothing) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastCPU);
  if (logits.scalar_type() == at::kBFloat16 && is_supported(logits, target, weight, smoothing))
    return reduced(logits, target, reduction, ignored.expect_int());
  const auto cast = [](const auto& tensor) { return at::autocast::cached_cast(at::kFloat, tensor, at::kCPU); };
  return at::cross_entropy_loss_symint(cast(logits), cast(target), cast(weight), reduction, ignored, smoothing);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cpulaunch, library) {
  library.def("cross_entropy(Tensor logits, Tensor target, int ignored) -> (Tensor, Tensor)",
              {at::Tag::pt2_compliant_tag});
  library.def(
      "cross_entropy_backward(Tensor gradient, Tensor logits, Tensor target, Tensor softmaxes, int ignored) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(cpulaunch, CPU, library) {
  library.impl("cross_entropy", cross_entropy);
  library.impl("cross_entropy_backward", cross_entropy_backward);
}

TORCH_LIBRARY_IMPL(cpulaunch, Meta, library) {
  library.impl("cross_entropy", cross_entropy_meta);
  library.impl("cross_entropy_backward", cross_entropy_backward_meta);
}

TORCH_LIBRARY_IMPL(cpulaunch, Autograd, library) { library.impl("cross_entropy", cross_entropy_autograd); }

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { library.impl("cross_entropy_loss", aten_cross_entropy); }

void replace_autocast(torch::Library& autocast) { autocast.impl("cross_entropy_loss", autocast_cross_entropy); }

}  // namespace cpulaunch::kernels
