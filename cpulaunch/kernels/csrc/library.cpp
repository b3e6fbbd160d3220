// The functions by which Python controls the library as a whole.
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/library.h>

#include "plain.hpp"

namespace cpulaunch::kernels {
namespace {

constexpr const char* names[] = {  // in the order of Operation
    "dropout", "attention with dropout", "products of transposed matrices", "gelu with tanh", "cross entropy",
    "large casts", "gradients of embeddings"};
std::atomic<bool> computed[std::size(names)];

// Suppresses torch's warnings that its kernels are replaced: that is the purpose.
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void use(bool on) {
  static std::mutex mutex;
  static std::unique_ptr<torch::Library> aten, autocast;  // their destructors restore torch's kernels
  const std::lock_guard<std::mutex> lock(mutex);
  in_use = on;
  if (!on) aten.reset(), autocast.reset();
  if (!on || aten) return;
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  using c10::DispatchKey;
  const auto implement = torch::Library::IMPL;
  aten = std::make_unique<torch::Library>(implement, "aten", DispatchKey::CPU, __FILE__, __LINE__);
  autocast = std::make_unique<torch::Library>(implement, "aten", DispatchKey::AutocastCPU, __FILE__, __LINE__);
  replace_products(*aten);
  replace_gelu(*aten);
  replace_casts(*aten);
  replace_embedding(*aten);
  replace_autocast(*autocast);
}

std::vector<std::string> replaced() {
  std::vector<std::string> found;
  for (size_t i = 0; i < std::size(names); ++i)
    if (computed[i]) found.push_back(names[i]);
  return found;
}

std::string vector_unit() { return vector().name; }

}  // namespace

void note(Operation operation) { computed[size_t(operation)].store(true, std::memory_order_relaxed); }

TORCH_LIBRARY_FRAGMENT(cpulaunch, library) {
  library.def("use(bool on) -> ()", use);
  library.def("replaced() -> str[]", replaced);
  library.def("vector_unit() -> str", vector_unit);
}

}  // namespace cpulaunch::kernels
