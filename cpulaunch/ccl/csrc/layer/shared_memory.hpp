// Tensors in memory that the other ranks of this host may map (shared_blocks.hpp).

#pragma once

#include <ATen/core/Tensor.h>

namespace cpulaunch {

// Moves a tensor's storage, and so all tensors that use it, to such memory.  Returns false and moves nothing if there
// is none.
bool share_memory(const at::Tensor& tensor);

// Returns an uninitialized tensor of `size` elements.  It is in such memory if it is large enough and there is some,
// and else in ordinary memory.
at::Tensor allocate_shared(int64_t size, const at::TensorOptions& options);

}  // namespace cpulaunch
