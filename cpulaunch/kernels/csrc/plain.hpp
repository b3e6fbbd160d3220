// Decides which calls of torch's operations this library computes.
#pragma once

#include <atomic>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "vector.hpp"

namespace cpulaunch::kernels {

extern std::atomic<bool> in_use;  // set by `cpulaunch::use`; if false, torch computes everything

// The operations that this library computes in place of torch.
enum class Operation { dropout, attention, products, gelu, cross_entropy, casts, embedding };

// Records for `cpulaunch::replaced` that this library has computed an operation.
void note(Operation operation);

// Replace torch's kernels for plain CPU tensors.  The layers above (autograd, function transforms, torch.compile) all
// end up in these kernels.
void replace_products(torch::Library& aten);
void replace_gelu(torch::Library& aten);
void replace_casts(torch::Library& aten);
void replace_embedding(torch::Library& aten);

// Replaces operations of autocast, the layer above autograd.
void replace_autocast(torch::Library& autocast);

// Whether this is a dense tensor, and no subclass or wrapper.
bool is_dense(const at::Tensor& tensor);

// Whether this is a dense tensor of fp32 or bf16 that is not empty.  False while torch traces or transforms functions,
// because torch can decompose only its own operations.
bool is_plain(const at::Tensor& tensor);

// Returns the loops for this CPU, or for the lesser CPU that ATEN_CPU_CAPABILITY names.
const Vector& vector();

// The bits of bf16 numbers, as the loops take them.
inline const uint16_t* bits(const at::BFloat16* data) { return reinterpret_cast<const uint16_t*>(data); }
inline uint16_t* bits(at::BFloat16* data) { return reinterpret_cast<uint16_t*>(data); }

// Draws a seed, a tensor of one int64, from torch's generator, which torch.manual_seed seeds.
at::Tensor draw_seed();

}  // namespace cpulaunch::kernels
