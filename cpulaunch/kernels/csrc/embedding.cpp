// The gradient of a large embedding, for models whose last layer shares the embedding's weights.  torch makes a tensor
// of zeros as large as the weights, fills the rows of the batch, and adds this tensor to the last layer's gradient.
// Here, backward sets the rows aside, and returns no gradient.  Autograd calls a hook once it has added up the other
// gradients of the weights.  The hook adds the rows, or makes the gradient as torch does if there are no others.
#include <map>
#include <mutex>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding_dense_backward_native.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "plain.hpp"

namespace cpulaunch::kernels {
namespace {

using at::Tensor;
using torch::autograd::AccumulateGrad;
using torch::autograd::variable_list;
constexpr int64_t least_weights = 4 << 20;  // elements
constexpr int64_t least_rows_of_each = 8;   // rows of the weights, for each row of the batch

struct Rows {
  Tensor gradient, indices;
};

class AddRows : public torch::autograd::FunctionPreHook {
 public:
  void set_aside(const Tensor& gradient, const Tensor& indices) {
    const std::lock_guard<std::mutex> lock(mutex);
    rows[torch::autograd::get_current_graph_task_id()].push_back({gradient, indices});
  }

  variable_list operator()(const variable_list& gradients) override {
    const std::vector<Rows> found = take();
    if (found.empty()) return gradients;
    Tensor sum = is_ours(gradients[0]) ? gradients[0] : gradients[0].defined() ? gradients[0].clone() : Tensor();
    for (const Rows& each : found) {
      if (sum.defined())
        sum.index_add_(0, each.indices, each.gradient);
      else
        sum = at::native::embedding_dense_backward_cpu(each.gradient, each.indices, count, -1, false);
    }
    return {sum};
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}  // compiled graphs set none aside

  explicit AddRows(int64_t count) : count(count) {}

 private:
  // Returns the rows that this backward pass has set aside.  Those of a pass that failed are never taken.
  std::vector<Rows> take() {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = rows.find(torch::autograd::get_current_graph_task_id());
    if (found == rows.end()) return {};
    std::vector<Rows> result = std::move(found->second);
    rows.erase(found);
    return result;
  }

  // Whether nothing else refers to the tensor, so that it may be changed.
  static bool is_ours(const Tensor& tensor) {
    return tensor.defined() && is_dense(tensor) && tensor.is_non_overlapping_and_dense() && tensor.use_count() == 1 &&
           tensor.storage().use_count() == 1;
  }

  const int64_t count;  // rows of the weights
  std::mutex mutex;
  std::map<int64_t, std::vector<Rows>> rows;  // by the number of the backward pass
};

// Returns the weights' hook.  Null if hooks of the program come first, because these would see no gradient.
AddRows* hook_of(const Tensor& weights) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto& hooks = torch::autograd::impl::hooks(weights);
  if (hooks.empty()) torch::autograd::impl::add_hook(weights, std::make_unique<AddRows>(weights.size(0)));
  return dynamic_cast<AddRows*>(hooks.front().get());
}

// Returns the hook if autograd is computing the gradient of an embedding whose weights are a leaf of its graph.
AddRows* current_hook(const Tensor& gradient, int64_t count) {
  const auto node = torch::autograd::get_current_node();
  if (!node || node->name() != "EmbeddingBackward0" || node->num_outputs() != 1) return nullptr;
  auto* leaf = dynamic_cast<AccumulateGrad*>(node->next_edge(0).function.get());
  if (!leaf || !is_dense(leaf->variable)) return nullptr;
  const Tensor& weights = leaf->variable;
  const bool fits = weights.dim() == 2 && weights.is_contiguous() && weights.size(0) == count &&
                    weights.scalar_type() == gradient.scalar_type();
  return fits ? hook_of(weights) : nullptr;
}

Tensor embedding_dense_backward(const Tensor& gradient, const Tensor& indices, int64_t count, int64_t padding,
                                bool by_frequency) {
  const int64_t width = gradient.size(-1), size = indices.numel();
  AddRows* hook = nullptr;
  if (padding < 0 && !by_frequency && count * width >= least_weights && size * least_rows_of_each <= count &&
      !at::GradMode::is_enabled() && is_dense(gradient) && is_dense(indices))
    hook = current_hook(gradient, count);
  if (!hook) return at::native::embedding_dense_backward_cpu(gradient, indices, count, padding, by_frequency);
  note(Operation::embedding);
  hook->set_aside(gradient.reshape({size, width}), indices.reshape({size}));
  return Tensor();
}

}  // namespace

void replace_embedding(torch::Library& aten) { aten.impl("embedding_dense_backward", embedding_dense_backward); }

}  // namespace cpulaunch::kernels
