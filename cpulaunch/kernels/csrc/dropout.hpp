#pragma once

#include <ATen/core/Tensor.h>

namespace cpulaunch::kernels {

// The operation cpulaunch::dropout: the seed, one int64, determines the mask.
at::Tensor call_dropout(const at::Tensor& input, const at::Tensor& seed, double p);

}  // namespace cpulaunch::kernels
