// What Python asks of the library as a whole.
#include <string>
#include <vector>

#include <torch/library.h>

#include "plain.hpp"

namespace cpulaunch::kernels {

extern std::atomic<bool> dropout_replaced, attention_replaced;

namespace {

void use(bool on) { in_use = on; }

std::vector<std::string> replaced() {
  std::vector<std::string> names;
  if (dropout_replaced) names.push_back("dropout");
  if (attention_replaced) names.push_back("attention with dropout");
  return names;
}

std::string vector_unit() { return vector().name; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(cpulaunch, library) {
  library.def("use(bool on) -> ()", use);
  library.def("replaced() -> str[]", replaced);
  library.def("vector_unit() -> str", vector_unit);
}

}  // namespace cpulaunch::kernels
