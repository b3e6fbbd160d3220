#pragma once

#include <ATen/core/Tensor.h>

namespace cpulaunch::kernels {

// Calls the operation cpulaunch::dropout.  `seed`, a tensor of one int64, determines the mask.
at::Tensor call_dropout(const at::Tensor& input, const at::Tensor& seed, double p);

}  // namespace cpulaunch::kernels
