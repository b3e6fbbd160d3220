#pragma once

#include <ATen/core/Tensor.h>

namespace cpulaunch::kernels {

// The operation cpulaunch::dropout_replay: dropout as it was with this seed.  It has derivatives of every order.
at::Tensor call_replay(const at::Tensor& input, const at::Tensor& seed, double p);

}  // namespace cpulaunch::kernels
