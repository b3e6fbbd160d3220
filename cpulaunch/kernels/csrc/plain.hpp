// Which calls of torch's operations are ours to compute.
#pragma once

#include <atomic>

#include <ATen/core/Tensor.h>

#include "vector.hpp"

namespace cpulaunch::kernels {

extern std::atomic<bool> in_use;  // by `cpulaunch::use`; where it is false, torch computes

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
