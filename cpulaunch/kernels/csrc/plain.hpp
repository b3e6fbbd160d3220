// Which calls of torch's operations are ours to compute.
#pragma once

#include <atomic>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "vector.hpp"

namespace cpulaunch::kernels {

extern std::atomic<bool> in_use;  // by `cpulaunch::use`; where it is false, torch computes

// What is computed in torch's place.
enum class Operation { dropout, attention, products, gelu, cross_entropy, casts };

// Notes that an operation was ours, for `cpulaunch::replaced`.
void note(Operation operation);

// Replace kernels of torch for plain CPU tensors, to which everything above them (autograd, transforms of functions,
// torch.compile) comes down.
void replace_products(torch::Library& aten);
void replace_gelu(torch::Library& aten);
void replace_casts(torch::Library& aten);

// A dense tensor of no subclass or wrapper.
bool is_dense(const at::Tensor& tensor);

// A dense tensor of fp32 or bf16, with elements.  False while torch traces or transforms functions: it knows the
// parts of its own operations.
bool is_plain(const at::Tensor& tensor);

// The loops for this CPU, or for the lesser one that ATEN_CPU_CAPABILITY names.
const Vector& vector();

// A seed from torch's generator, which torch.manual_seed determines: one int64.
at::Tensor draw_seed();

}  // namespace cpulaunch::kernels
