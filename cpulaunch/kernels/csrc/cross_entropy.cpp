// Cross entropy with class indices, in fp32.  Backward computes the gradient from the logits in one pass.  So, unlike
// in torch, no tensor holds the logarithms of all probabilities, nor a gradient with respect to them, which is mostly
// zeros.
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
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
using Losses = std::tuple<Tensor, Tensor>;  // the loss and log(sum(exp(logits))) of each row

constexpr int64_t least_classes = 256;  // with fewer, the calls take longer than the loops

void check(const Tensor& logits, const Tensor& target) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat,
              "cpulaunch::cross_entropy: logits must be a matrix of float32");
  TORCH_CHECK(target.dim() == 1 && target.scalar_type() == at::kLong && target.sym_size(0) == logits.sym_size(0),
              "cpulaunch::cross_entropy: the target must have an int64 for each row of logits");
}

Losses cross_entropy(const Tensor& logits, const Tensor& target, int64_t ignored) {
  check(logits, target);
  const Tensor from = logits.contiguous(), classes = target.contiguous();
  const int64_t rows = from.size(0), width = from.size(1);
  Tensor losses = at::empty({rows}, from.options()), logsums = at::empty({rows}, from.options());
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* logit = from.const_data_ptr<float>() + row * width;
      const int64_t chosen = classes.const_data_ptr<int64_t>()[row];
      TORCH_CHECK_INDEX(chosen == ignored || (chosen >= 0 && chosen < width), "Target ", chosen,
                        " is out of bounds.");
      float largest = 0, log_of_sum = 0;
      if (chosen != ignored) vector().log_sum(logit, width, &largest, &log_of_sum);
      logsums.mutable_data_ptr<float>()[row] = largest + log_of_sum;
      losses.mutable_data_ptr<float>()[row] = chosen == ignored ? 0 : log_of_sum - (logit[chosen] - largest);
    }
  });
  return {losses, logsums};
}

Tensor cross_entropy_backward(const Tensor& gradient, const Tensor& logits, const Tensor& target,
                              const Tensor& logsums, int64_t ignored) {
  check(logits, target);
  const Tensor from = logits.contiguous(), classes = target.contiguous(), factors = gradient.contiguous();
  const int64_t rows = from.size(0), width = from.size(1);
  Tensor result = at::empty({rows, width}, from.options());
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* to = result.mutable_data_ptr<float>() + row * width;
      const int64_t chosen = classes.const_data_ptr<int64_t>()[row];
      const float factor = factors.const_data_ptr<float>()[row];
      if (chosen == ignored) {
        std::fill_n(to, width, 0.0f);
        continue;
      }
      vector().exponentials(from.const_data_ptr<float>() + row * width, logsums.const_data_ptr<float>()[row],
                            factor, to, width);
      to[chosen] -= factor;
    }
  });
  return result;
}

Losses cross_entropy_meta(const Tensor& logits, const Tensor& target, int64_t) {
  check(logits, target);
  return {at::empty_symint({logits.sym_size(0)}, logits.options()),
          at::empty_symint({logits.sym_size(0)}, logits.options())};
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

Tensor call_backward(const Tensor& gradient, const Tensor& logits, const Tensor& target, const Tensor& logsums,
                     int64_t ignored) {
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("cpulaunch::cross_entropy_backward", "")
                                    .typed<decltype(cross_entropy_backward)>();
  return operation.call(gradient, logits, target, logsums, ignored);
}

struct CrossEntropy : Function<CrossEntropy> {
  static variable_list forward(AutogradContext* context, const Tensor& logits, const Tensor& target,
                               int64_t ignored) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [losses, logsums] = call_cross_entropy(logits, target, ignored);
    context->save_for_backward({logits, target, logsums});
    context->saved_data["ignored"] = ignored;
    context->mark_non_differentiable({logsums});
    return {losses, logsums};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &logits = saved[0], &target = saved[1], &logsums = saved[2];
    const int64_t ignored = context->saved_data["ignored"].toInt();
    if (!at::GradMode::is_enabled())
      return {call_backward(gradients[0], logits, target, logsums, ignored), Tensor(), Tensor()};
    const Tensor counts = target.ne(ignored);  // torch's operations: the program needs derivatives of this derivative
    const Tensor chosen = at::one_hot(at::where(counts, target, 0), logits.size(1));
    return {(at::softmax(logits, 1) - chosen) * at::where(counts, gradients[0], 0).unsqueeze(1), Tensor(), Tensor()};
  }
};

Losses cross_entropy_autograd(const Tensor& logits, const Tensor& target, int64_t ignored) {
  auto made = CrossEntropy::apply(logits, target, ignored);
  return {made[0], made[1]};
}

bool is_supported(const Tensor& logits, const Tensor& target) {
  return is_plain(logits) && is_dense(target) && logits.scalar_type() == at::kFloat && logits.dim() == 2 &&
         logits.is_contiguous() && target.scalar_type() == at::kLong && target.dim() == 1 &&
         target.size(0) == logits.size(0) && logits.size(1) >= least_classes;
}

// Replaces aten::cross_entropy_loss.
Tensor aten_cross_entropy(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& weight,
                          int64_t reduction, c10::SymInt ignored, double smoothing) {
  const bool weighted = weight.has_value() && weight->defined();
  if (!in_use || weighted || smoothing != 0 || !is_supported(logits, target))
    return at::native::cross_entropy_loss_symint(logits, target, weight, reduction, ignored, smoothing);
  note(Operation::cross_entropy);
  const int64_t index = ignored.expect_int();
  const Tensor losses = std::get<0>(call_cross_entropy(logits, target, index));
  if (reduction == at::Reduction::None) return losses;
  const Tensor sum = losses.sum();
  return reduction == at::Reduction::Sum ? sum : sum / target.ne(index).sum();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cpulaunch, library) {
  library.def("cross_entropy(Tensor logits, Tensor target, int ignored) -> (Tensor, Tensor)",
              {at::Tag::pt2_compliant_tag});
  library.def(
      "cross_entropy_backward(Tensor gradient, Tensor logits, Tensor target, Tensor logsums, int ignored) -> Tensor",
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

}  // namespace cpulaunch::kernels
