#include "libfabric.hpp"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>

namespace cpulaunch::libfabric {

namespace {

template <class Function>
void find(void* library, const char* name, const char* version, Function& function) {
  void* found = dlvsym(library, name, version);
  if (!found) throw std::runtime_error(std::string("libfabric is too old: it has no ") + name + " of " + version);
  function = reinterpret_cast<Function>(found);
}

Library loaded_from(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(std::string("libfabric does not load: ") + dlerror());
  Library its{};
  find(library, "fi_dupinfo", "FABRIC_1.3", its.copy);
  find(library, "fi_freeinfo", "FABRIC_1.3", its.free);
  find(library, "fi_getinfo", "FABRIC_1.3", its.ask);
  find(library, "fi_fabric", "FABRIC_1.1", its.open);
  find(library, "fi_strerror", "FABRIC_1.0", its.text);
  return its;
}

}  // namespace

const Library& Library::load(const std::string& path) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::string, Library>;  // never destroyed: used while the process ends, too
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = all.find(path);
  return found != all.end() ? found->second : all.emplace(path, loaded_from(path)).first->second;
}

}  // namespace cpulaunch::libfabric
