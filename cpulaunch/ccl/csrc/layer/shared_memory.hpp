// Tensors in memory that the other ranks of this host may map (shared_blocks.hpp).

#pragma once

#include <ATen/core/Tensor.h>

namespace cpulaunch {

// Moves a tensor's storage, and so all tensors that use it, to shared memory.  Returns false and moves nothing if no
// shared memory is available.
bool share_memory(const at::Tensor& tensor);

// Returns an uninitialized tensor of `size` elements.  It is in shared memory if it is large enough and shared memory
// is available, otherwise in ordinary memory.
at::Tensor allocate_shared(int64_t size, const at::TensorOptions& options);

}  // namespace cpulaunch
