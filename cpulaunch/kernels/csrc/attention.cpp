// Attention with dropout and masks, forward and backward.  A thread holds the scores of only one block of queries of
// one head at a time.  No tensor holds all scores, whereas torch stores several matrices of queries × keys for each
// head.  oneDNN computes the matrix products, through torch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "dropout.hpp"
#include "plain.hpp"

namespace cpulaunch::kernels {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;
using Attended = std::tuple<Tensor, Tensor>;           // the output, and log(sum(exp(scores)))
using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of query, key, value

constexpr int64_t most_scores = 1 << 16;  // of a block of queries; together with their gradients, they fit an L2 cache
constexpr int64_t most_queries = 128;
constexpr int64_t most_depth = 256;

int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// The panel width for a bf16 matrix with `width` columns.  oneDNN supports panels of 16, 32, 48 and 64 columns.
int64_t panel_of(int64_t width) { return width % 64 == 0 ? 64 : width % 32 == 0 ? 32 : 16; }

// The sizes that forward and backward share, and the parameters of a head's loops.
struct Shape {
  int64_t batch, heads, queries, keys, depth;
  int64_t width;    // the number of keys, rounded up to whole blocks of random numbers
  int64_t block;    // the number of queries at a time
  double p, scale;
  bool causal;

  Shape(const Tensor& query, const Tensor& key, double p, bool causal, double scale)
      : batch(query.size(0)), heads(query.size(1)), queries(query.size(2)), keys(key.size(2)),
        depth(query.size(3)), width(round_up(keys, block_size)), p(p), scale(scale), causal(causal) {
    block = std::min(most_queries, std::max(block_size, most_scores / width / block_size * block_size));
    block = std::min(block, queries);
  }

  Rows rows(const OptionalTensor& mask, uint64_t seed, int64_t head, int64_t first, int64_t count) const {
    Bias bias{Bias::none, nullptr, 0, 0};
    if (mask.has_value()) {
      const auto type = mask->scalar_type();
      bias.kind = type == at::kBool ? Bias::boolean : type == at::kFloat ? Bias::fp32 : Bias::bf16;
      bias.by_query = mask->stride(2);
      bias.by_key = mask->stride(3);
      const int64_t start = head / heads * mask->stride(0) + head % heads * mask->stride(1);
      bias.data = static_cast<const char*>(mask->const_data_ptr()) + start * mask->element_size();
    }
    const auto made = Mask::of(seed, p);
    const uint64_t first_block = (head * queries + first) * (width / block_size);
    return {first, count, keys, width, float(scale), causal, bias, made, first_block};
  }
};

// The rows of one head in a tensor of shape (batch, heads, rows, depth).
template <typename T>
struct Head {
  T* data;
  int64_t stride;

  Head(const Tensor& tensor, int64_t head)
      : data(static_cast<T*>(tensor.data_ptr())), stride(tensor.stride(2)) {
    data += head / tensor.size(1) * tensor.stride(0) + head % tensor.size(1) * tensor.stride(1);
  }

  T* row(int64_t index) const { return data + index * stride; }
};

void fit(std::vector<at::BFloat16>& to, int64_t count) { to.resize(count); }
void fit(std::vector<float>& to, int64_t count) { to.resize(count); }

// The right side of a product in oneDNN's format: panels for bf16, plain rows for fp32.
template <typename T>
struct Right {
  const T* data = nullptr;
  int64_t stride = 0;  // between rows, or the panels' width
  std::vector<T> memory;

  // Sets this to the transpose of `rows` rows, padded with columns of zeros to `width`.
  void transpose(const Head<T>& from, int64_t rows, int64_t width, int64_t depth) {
    constexpr bool is_float = std::is_same_v<T, float>;
    stride = is_float ? width : panel_of(width);
    fit(memory, width * depth);
    if (rows < width) memset(static_cast<void*>(memory.data()), 0, memory.size() * sizeof(T));
    const int64_t units = depth * int64_t(sizeof(T)) / 4;  // units of 32 bits, which keep pairs of bf16 together
    auto* to = reinterpret_cast<uint32_t*>(memory.data());
    for (int64_t panel = 0; panel < rows; panel += stride)
      vector().transpose32(from.row(panel), std::min(stride, rows - panel), from.stride * sizeof(T), units,
                           to + panel * units, stride);
    data = memory.data();
  }

  // Sets this to the rows, not transposed.
  void take(const Head<float>& from, int64_t, int64_t) { data = from.data, stride = from.stride; }
  void take(const Head<at::BFloat16>& from, int64_t rows, int64_t depth) {
    stride = panel_of(depth);
    fit(memory, round_up(rows, 2) * depth);
    vector().panels_of_bfloat16(bits(from.data), rows, from.stride, depth, stride, bits(memory.data()));
    data = memory.data();
  }

  // Sets this to contiguous rows of fp32.
  void take(const float* from, int64_t rows, int64_t width);
};

template <>
void Right<float>::take(const float* from, int64_t, int64_t width) { data = from, stride = width; }

template <>
void Right<at::BFloat16>::take(const float* from, int64_t rows, int64_t width) {
  stride = panel_of(width);
  fit(memory, round_up(rows, 2) * width);
  vector().panels_of_float(from, rows, width, width, stride, bits(memory.data()));
  data = memory.data();
}

// to[m][n] = left[m][k] · right[k][n]; += instead of = if `add`.
void multiply(int64_t m, int64_t n, int64_t k, const float* left, int64_t stride, const Right<float>& right,
              float* to, bool add) {
  at::native::cpublas::brgemm(m, n, k, stride, right.stride, n, add, left, right.data, to, false);
}

void multiply(int64_t m, int64_t n, int64_t k, const at::BFloat16* left, int64_t stride,
              const Right<at::BFloat16>& right, float* to, bool add) {
  const int64_t pairs = round_up(k, 2), panel = right.stride;
  for (int64_t column = 0; column < n; column += panel)
    at::native::cpublas::brgemm(m, panel, pairs, stride, panel, n, add, left, right.data + column * pairs,
                                to + column, true);
}

// The left side of a product: contiguous rows of fp32, converted to T.
const float* as_left(const float* rows, int64_t, std::vector<float>&) { return rows; }

const at::BFloat16* as_left(const float* rows, int64_t count, std::vector<at::BFloat16>& memory) {
  fit(memory, count);
  vector().scaled_bfloat16(rows, 1, bits(memory.data()), count);
  return memory.data();
}

void put(const float* from, float factor, float* to, int64_t count) {
  vector().scaled_float(from, factor, to, count);
}

void put(const float* from, float factor, at::BFloat16* to, int64_t count) {
  vector().scaled_bfloat16(from, factor, bits(to), count);
}

float inner(const float* one, const float* other, int64_t count) {
  return vector().inner_float(one, other, count);
}

float inner(const at::BFloat16* one, const at::BFloat16* other, int64_t count) {
  return vector().inner_bfloat16(bits(one), bits(other), count);
}

void transpose(const float* from, int64_t rows, int64_t stride, int64_t columns, float* to, int64_t to_stride) {
  vector().transpose32(from, rows, stride * sizeof(float), columns, reinterpret_cast<uint32_t*>(to), to_stride);
}

void transpose(const at::BFloat16* from, int64_t rows, int64_t stride, int64_t columns, at::BFloat16* to,
               int64_t to_stride) {
  vector().transpose16(from, rows, stride * sizeof(at::BFloat16), columns, bits(to), to_stride);
}

// The transpose of `rows` rows, padded with zeros to an even number of columns.
template <typename T>
const T* transposed(const Head<T>& from, int64_t first, int64_t rows, int64_t depth, std::vector<T>& memory) {
  const int64_t columns = round_up(rows, 2);
  fit(memory, depth * columns);
  if (columns > rows)
    for (int64_t i = 0; i < depth; ++i) memory[i * columns + rows] = T(0);
  transpose(from.row(first), rows, from.stride, depth, memory.data(), columns);
  return memory.data();
}

template <typename T>
void attend(const Shape& shape, const Tensor& query, const Tensor& key, const Tensor& value,
            const OptionalTensor& mask, uint64_t seed, const Tensor& output, const Tensor& logsum) {
  at::parallel_for(0, shape.batch * shape.heads, 1, [&](int64_t begin, int64_t end) {
    Right<T> keys, values;
    std::vector<T> memory;
    std::vector<float> scores(shape.block * shape.width), product(shape.block * shape.depth);
    float factor[most_queries];
    for (int64_t head = begin; head < end; ++head) {
      const Head<T> q(query, head), to(output, head);
      keys.transpose(Head<T>(key, head), shape.keys, shape.width, shape.depth);
      values.take(Head<T>(value, head), shape.keys, shape.depth);
      float* logs = logsum.mutable_data_ptr<float>() + head * shape.queries;
      for (int64_t first = 0; first < shape.queries; first += shape.block) {
        const int64_t count = std::min(shape.block, shape.queries - first);
        multiply(count, shape.width, shape.depth, q.row(first), q.stride, keys, scores.data(), false);
        vector().softmax(shape.rows(mask, seed, head, first, count), scores.data(), factor, logs + first);
        const T* left = as_left(scores.data(), count * shape.width, memory);
        multiply(count, shape.depth, shape.keys, left, shape.width, values, product.data(), false);
        for (int64_t row = 0; row < count; ++row)
          put(product.data() + row * shape.depth, factor[row], to.row(first + row), shape.depth);
      }
    }
    if (!std::is_same_v<T, float>) at::native::cpublas::brgemm_release(true);
  });
}

template <typename T>
struct BackwardMemory {
  Right<T> keys, values, whole_keys, probabilities, of_scores;
  std::vector<T> left, queries, gradients;
  std::vector<float> scores, gradient, product, of_keys, of_values, whole;

  explicit BackwardMemory(const Shape& shape)
      : scores(shape.block * shape.width), gradient(shape.block * shape.width),
        product(shape.block * shape.depth), of_keys(shape.depth * shape.width),
        of_values(shape.depth * shape.width) {}
};

// Computes the gradient of a block of queries of a head, and adds their part to the gradients of the head's keys and
// values.
template <typename T>
void attend_backward_block(const Shape& shape, const Rows& rows, const Head<T>& q, const Head<T>& output,
                           const Head<T>& gradient, const Head<T>& to, const float* logs,
                           BackwardMemory<T>& its) {
  const int64_t first = rows.first_query, count = rows.count, pairs = round_up(count, 2);
  const int64_t depth = shape.depth, width = shape.width;
  multiply(count, width, depth, q.row(first), q.stride, its.keys, its.scores.data(), false);
  multiply(count, width, depth, gradient.row(first), gradient.stride, its.values, its.gradient.data(), false);
  float products[most_queries];
  for (int64_t row = 0; row < count; ++row)
    products[row] = inner(output.row(first + row), gradient.row(first + row), depth);
  vector().softmax_backward(rows, its.scores.data(), its.gradient.data(), logs + first, products);
  const T* left = as_left(its.gradient.data(), count * width, its.left);
  multiply(count, depth, shape.keys, left, width, its.whole_keys, its.product.data(), false);
  for (int64_t row = 0; row < count; ++row)
    put(its.product.data() + row * depth, 1, to.row(first + row), depth);
  its.probabilities.take(its.scores.data(), count, width);
  its.of_scores.take(its.gradient.data(), count, width);
  const T* gradients = transposed(gradient, first, count, depth, its.gradients);
  multiply(depth, width, count, gradients, pairs, its.probabilities, its.of_values.data(), first > 0);
  const T* queries = transposed(q, first, count, depth, its.queries);
  multiply(depth, width, count, queries, pairs, its.of_scores, its.of_keys.data(), first > 0);
}

// Stores the gradient of a head's keys or values, which is computed transposed.
template <typename T>
void finish(const Shape& shape, const std::vector<float>& from, const Head<T>& to, std::vector<float>& memory) {
  fit(memory, shape.width * shape.depth);
  transpose(from.data(), shape.depth, shape.width, shape.keys, memory.data(), shape.depth);
  for (int64_t row = 0; row < shape.keys; ++row)
    put(memory.data() + row * shape.depth, 1, to.row(row), shape.depth);
}

template <typename T>
void attend_backward(const Shape& shape, const Tensor& gradient, const Tensor& query, const Tensor& key,
                     const Tensor& value, const OptionalTensor& mask, const Tensor& output,
                     const Tensor& logsum, uint64_t seed, const Gradients& to) {
  at::parallel_for(0, shape.batch * shape.heads, 1, [&](int64_t begin, int64_t end) {
    BackwardMemory<T> its(shape);
    for (int64_t head = begin; head < end; ++head) {
      its.keys.transpose(Head<T>(key, head), shape.keys, shape.width, shape.depth);
      its.values.transpose(Head<T>(value, head), shape.keys, shape.width, shape.depth);
      its.whole_keys.take(Head<T>(key, head), shape.keys, shape.depth);
      const float* logs = logsum.const_data_ptr<float>() + head * shape.queries;
      for (int64_t first = 0; first < shape.queries; first += shape.block) {
        const int64_t count = std::min(shape.block, shape.queries - first);
        attend_backward_block(shape, shape.rows(mask, seed, head, first, count), Head<T>(query, head),
                              Head<T>(output, head), Head<T>(gradient, head), Head<T>(std::get<0>(to), head),
                              logs, its);
      }
      finish(shape, its.of_keys, Head<T>(std::get<1>(to), head), its.whole);
      finish(shape, its.of_values, Head<T>(std::get<2>(to), head), its.whole);
    }
    if (!std::is_same_v<T, float>) at::native::cpublas::brgemm_release(true);
  });
}

// --- operations

// An empty tensor with the memory order (batch, rows, heads, depth), which models use next without a copy.
Tensor like(const Tensor& tensor) {
  return at::empty({tensor.size(0), tensor.size(2), tensor.size(1), tensor.size(3)}, tensor.options())
      .transpose(1, 2);
}

Tensor like_symbolic(const Tensor& tensor) {
  return at::empty_symint({tensor.sym_size(0), tensor.sym_size(2), tensor.sym_size(1), tensor.sym_size(3)},
                          tensor.options())
      .transpose(1, 2);
}

Tensor with_dense_rows(const Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

OptionalTensor expanded(const OptionalTensor& mask, const Tensor& query, const Tensor& key) {
  if (!mask.has_value()) return mask;
  return mask->expand({query.size(0), query.size(1), query.size(2), key.size(2)});
}

void check(const Tensor& query, const Tensor& key, const Tensor& value, double p) {
  TORCH_CHECK(p > 0 && p < 1, "cpulaunch::attention: p must be between 0 and 1, got ", p);
  TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
              "cpulaunch::attention: query, key and value must have 4 dimensions");
  const auto type = query.scalar_type();
  TORCH_CHECK((type == at::kFloat || type == at::kBFloat16) && key.scalar_type() == type &&
                  value.scalar_type() == type,
              "cpulaunch::attention: query, key and value must be float32, or all bfloat16");
}

Attended attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                   const Tensor& seed, double p, bool causal, double scale) {
  check(query, key, value, p);
  const Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  const Shape shape(q, k, p, causal, scale);
  Tensor output = like(query);
  Tensor logsum = at::empty({shape.batch, shape.heads, shape.queries}, query.options().dtype(at::kFloat));
  const auto run = q.scalar_type() == at::kFloat ? attend<float> : attend<at::BFloat16>;
  run(shape, q, k, v, expanded(mask, q, k), *seed.const_data_ptr<int64_t>(), output, logsum);
  return {output, logsum};
}

Gradients attention_backward(const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
                             const OptionalTensor& mask, const Tensor& output, const Tensor& logsum,
                             const Tensor& seed, double p, bool causal, double scale) {
  check(query, key, value, p);
  const Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  const Shape shape(q, k, p, causal, scale);
  Gradients to{like(query), like(key), like(value)};
  const auto run = q.scalar_type() == at::kFloat ? attend_backward<float> : attend_backward<at::BFloat16>;
  run(shape, with_dense_rows(gradient), q, k, v, expanded(mask, q, k), with_dense_rows(output), logsum,
      *seed.const_data_ptr<int64_t>(), to);
  return to;
}

Attended attention_meta(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                        const Tensor& seed, double p, bool causal, double scale) {
  check(query, key, value, p);
  Tensor logsum = at::empty_symint({query.sym_size(0), query.sym_size(1), query.sym_size(2)},
                                   query.options().dtype(at::kFloat));
  return {like_symbolic(query), logsum};
}

Gradients attention_backward_meta(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const OptionalTensor& mask, const Tensor& output,
                                  const Tensor& logsum, const Tensor& seed, double p, bool causal, double scale) {
  return {like_symbolic(query), like_symbolic(key), like_symbolic(value)};
}

Attended call_attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                        const Tensor& seed, double p, bool causal, double scale) {
  static const auto operation =
      c10::Dispatcher::singleton().findSchemaOrThrow("cpulaunch::attention", "").typed<decltype(attention)>();
  return operation.call(query, key, value, mask, seed, p, causal, scale);
}

Gradients call_attention_backward(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const OptionalTensor& mask, const Tensor& output,
                                  const Tensor& logsum, const Tensor& seed, double p, bool causal, double scale) {
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("cpulaunch::attention_backward", "")
                                    .typed<decltype(attention_backward)>();
  return operation.call(gradient, query, key, value, mask, output, logsum, seed, p, causal, scale);
}

// Computes attention by torch's operations, which have derivatives of every order.  It drops the same scores as the
// kernels, because these number the scores in the same way as dropout numbers the elements of `ones`.
Tensor attention_by_parts(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                          const Tensor& seed, double p, bool causal, double scale) {
  const int64_t queries = query.size(2), keys = key.size(2);
  Tensor scores = at::matmul(query.to(at::kFloat), key.to(at::kFloat).transpose(2, 3)) * scale;
  const Tensor never = at::zeros({}, scores.options()).fill_(-INFINITY);
  if (mask.has_value())
    scores = mask->scalar_type() == at::kBool ? at::where(*mask, scores, never) : scores + *mask;
  if (causal)
    scores = at::where(at::ones({queries, keys}, scores.options().dtype(at::kBool)).tril(), scores, never);
  Tensor probabilities = at::softmax(scores, -1);
  probabilities = at::where(scores.isneginf().all(-1, true), at::zeros({}, scores.options()), probabilities);
  const Tensor ones =
      at::ones({query.size(0), query.size(1), queries, round_up(keys, block_size)}, scores.options());
  const Tensor kept = call_dropout(ones, seed, p).narrow(3, 0, keys);
  return at::matmul(probabilities * kept, value.to(at::kFloat)).to(query.scalar_type());
}

struct Attention : Function<Attention> {
  static variable_list forward(AutogradContext* context, const Tensor& query, const Tensor& key,
                               const Tensor& value, const OptionalTensor& mask, const Tensor& seed, double p,
                               bool causal, double scale) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, logsum] = call_attention(query, key, value, mask, seed, p, causal, scale);
    context->save_for_backward({query, key, value, mask.value_or(Tensor()), output, logsum, seed});
    context->saved_data["p"] = p;
    context->saved_data["causal"] = causal;
    context->saved_data["scale"] = scale;
    context->mark_non_differentiable({logsum});
    return {output, logsum};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &query = saved[0], &key = saved[1], &value = saved[2], &seed = saved[6];
    const OptionalTensor mask = saved[3].defined() ? OptionalTensor(saved[3]) : std::nullopt;
    const double p = context->saved_data["p"].toDouble(), scale = context->saved_data["scale"].toDouble();
    const bool causal = context->saved_data["causal"].toBool();
    variable_list result(8);
    if (at::GradMode::is_enabled()) {  // the program needs derivatives of this derivative
      variable_list inputs;
      for (int i = 0; i < 3; ++i)
        if (saved[i].requires_grad()) inputs.push_back(saved[i]);
      const Tensor output = attention_by_parts(query, key, value, mask, seed, p, causal, scale);
      auto found = torch::autograd::grad({output}, inputs, {gradients[0]}, true, true);
      for (int i = 0, next = 0; i < 3; ++i)
        if (saved[i].requires_grad()) result[i] = found[next++];
    } else {
      std::tie(result[0], result[1], result[2]) = call_attention_backward(
          gradients[0], query, key, value, mask, saved[4], saved[5], seed, p, causal, scale);
    }
    return result;
  }
};

Attended attention_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                            const OptionalTensor& mask, const Tensor& seed, double p, bool causal, double scale) {
  auto made = Attention::apply(query, key, value, mask, seed, p, causal, scale);
  return {made[0], made[1]};
}

bool is_supported(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask) {
  for (const Tensor* each : {&query, &key, &value}) {
    if (!is_plain(*each) || each->dim() != 4 || each->stride(3) != 1) return false;
    if (each->scalar_type() != query.scalar_type() || each->size(3) != query.size(3)) return false;
    if (each->size(0) != query.size(0) || each->size(1) != query.size(1)) return false;
  }
  if (key.size(2) != value.size(2) || query.size(3) > most_depth) return false;
  if (query.scalar_type() == at::kBFloat16 &&
      (query.size(3) % 16 != 0 || !at::native::cpublas::could_pack(at::kBFloat16)))
    return false;
  if (!mask.has_value()) return true;
  if (!is_dense(*mask) || mask->dim() > 4 || (mask->requires_grad() && at::GradMode::is_enabled())) return false;
  const auto type = mask->scalar_type();
  if (type != at::kBool && type != at::kFloat && type != query.scalar_type()) return false;
  const int64_t sizes[] = {query.size(0), query.size(1), query.size(2), key.size(2)};
  for (int64_t i = 1; i <= mask->dim(); ++i)
    if (mask->size(-i) != 1 && mask->size(-i) != sizes[4 - i]) return false;
  return true;
}

// Replaces aten::scaled_dot_product_attention for calls with dropout, for which torch would store all scores.
Tensor aten_attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                      double p, bool causal, std::optional<double> scale, bool grouped) {
  const bool wanted = in_use && p > 0 && p < 1 && !grouped && !(causal && mask.has_value()) &&
                      at::globalContext().userEnabledFlashSDP();
  if (!wanted || !is_supported(query, key, value, mask))
    return at::native::scaled_dot_product_attention(query, key, value, mask, p, causal, scale, grouped);
  note(Operation::attention);
  const double factor = scale.value_or(1 / std::sqrt(double(query.size(3))));
  return std::get<0>(call_attention(query, key, value, mask, draw_seed(), p, causal, factor));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cpulaunch, library) {
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor seed, float p, bool causal,"
      " float scale) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor output,"
      " Tensor logsum, Tensor seed, float p, bool causal, float scale) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(cpulaunch, CPU, library) {
  library.impl("attention", attention);
  library.impl("attention_backward", attention_backward);
}

TORCH_LIBRARY_IMPL(cpulaunch, Meta, library) {
  library.impl("attention", attention_meta);
  library.impl("attention_backward", attention_backward_meta);
}

TORCH_LIBRARY_IMPL(cpulaunch, Autograd, library) { library.impl("attention", attention_autograd); }

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  library.impl("scaled_dot_product_attention", aten_attention);
}

}  // namespace cpulaunch::kernels
