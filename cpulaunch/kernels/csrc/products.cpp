// Matrix products in bf16 whose left side is transposed, as in the gradient of a layer's weights.  On a CPU with AMX,
// oneDNN takes about 1.7 times as long for them as for plain matrices.  Transposing the left side first costs less.
#include <algorithm>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include "plain.hpp"

namespace cpulaunch::kernels {
namespace {

using at::Tensor;
constexpr int64_t least_rows = 64;       // rows and columns of the left side
constexpr int64_t least_columns = 256;  // of the right side, which is how often each element of the left is used
constexpr int64_t together = 128;       // rows of the copy that are written at a time

bool is_slow(const Tensor& left, const Tensor& right) {
  if (left.dim() != 2 || right.dim() != 2 || left.scalar_type() != at::kBFloat16) return false;
  if (right.scalar_type() != at::kBFloat16 || left.stride(0) != 1 || left.stride(1) < left.size(0)) return false;
  return left.size(0) >= least_rows && left.size(1) >= least_rows && right.size(1) >= least_columns &&
         left.size(1) == right.size(0) && at::native::cpublas::could_pack(at::kBFloat16) &&
         at::globalContext().userEnabledMkldnn();
}

// Copies a matrix so that its rows are contiguous.
Tensor with_rows_in_order(const Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1), stride = matrix.stride(1);
  Tensor result = at::empty({rows, columns}, matrix.options());
  const auto* from = static_cast<const uint16_t*>(matrix.const_data_ptr());
  auto* to = static_cast<uint16_t*>(result.mutable_data_ptr());
  at::parallel_for(0, (rows + together - 1) / together, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * together; row < std::min(end * together, rows); row += together)
      vector().transpose16(from + row, columns, stride * sizeof(uint16_t), std::min(together, rows - row),
                           to + row * columns, columns);
  });
  return result;
}

Tensor mm(const Tensor& left, const Tensor& right) {
  if (!is_slow(left, right)) return at::cpu::mm(left, right);
  note(Operation::products);
  return at::cpu::mm(with_rows_in_order(left), right);
}

Tensor& mm_out(const Tensor& left, const Tensor& right, Tensor& out) {
  if (!is_slow(left, right)) return at::cpu::mm_outf(left, right, out);
  note(Operation::products);
  return at::cpu::mm_outf(with_rows_in_order(left), right, out);
}

}  // namespace

void replace_products(torch::Library& aten) {
  aten.impl("mm", mm);
  aten.impl("mm.out", mm_out);
}

}  // namespace cpulaunch::kernels
