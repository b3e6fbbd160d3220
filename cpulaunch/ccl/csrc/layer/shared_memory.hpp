// Tensors in memory that the other ranks of this host may map (shared_blocks.hpp).

#pragma once

#include <ATen/core/Tensor.h>

namespace cpulaunch {

// Moves a tensor's storage, and so all tensors on it, there.  False where there is no such memory to be had; nothing is
// moved then.
bool share_memory(const at::Tensor& tensor);

// A tensor of this many elements there, whatever is in them; in ordinary memory where it is small, or there is none to
// be had.
at::Tensor allocate_shared(int64_t size, const at::TensorOptions& options);

}  // namespace cpulaunch
