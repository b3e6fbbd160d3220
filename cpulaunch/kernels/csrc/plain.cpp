#include "plain.hpp"

#include <cmath>
#include <mutex>
#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/Version.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace cpulaunch::kernels {

std::atomic<bool> in_use{false};

namespace {

bool is_traced() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  for (auto key : {TorchDispatchModeKey::FAKE, TorchDispatchModeKey::PROXY, TorchDispatchModeKey::FUNCTIONAL})
    if (TorchDispatchModeTLS::get_mode(key).has_value()) return true;
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return false;
  try {
    transforms->checkSupportsCppAutogradFunction();  // throws within a transform
  } catch (const c10::Error&) {
    return true;
  }
  return false;
}

}  // namespace

bool is_dense(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static const uint64_t usual =
      c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::ADInplaceOrView,
                           DispatchKey::AutocastCPU})
          .raw_repr();
  return tensor.defined() && (tensor.key_set().raw_repr() & ~usual) == 0;
}

bool is_plain(const at::Tensor& tensor) {
  if (!is_dense(tensor)) return false;
  const auto type = tensor.scalar_type();
  return (type == at::kFloat || type == at::kBFloat16) && tensor.numel() > 0 && !tensor._fw_grad(0).defined() &&
         !is_traced();
}

const Vector& vector() {
#ifdef __x86_64__
  static const Vector& chosen = [&]() -> const Vector& {
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") return avx512;
    if (capability == "AVX2") return avx2;
    return portable;
  }();
  return chosen;
#else
  return portable;
#endif
}

at::Tensor draw_seed() {
  at::Tensor seed = at::empty({1}, at::kLong);
  auto generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  *seed.mutable_data_ptr<int64_t>() = int64_t(generator->random64());
  return seed;
}

Mask Mask::of(uint64_t seed, double p) {
  const double threshold = std::round(std::ldexp(p, 32));
  return {seed, uint32_t(std::fmin(std::fmax(threshold, 1), 4294967295.0)), float(1 / (1 - p))};
}

}  // namespace cpulaunch::kernels
