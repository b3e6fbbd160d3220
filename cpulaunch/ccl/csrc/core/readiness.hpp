// Finds which of many connections have data to read, by one system call for all of them.

#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace cpulaunch {

class Readiness {
 public:
  // For connections from `ranks` ranks.
  explicit Readiness(size_t ranks) : ready_(ranks) {}
  ~Readiness();
  Readiness(const Readiness&) = delete;
  Readiness& operator=(const Readiness&) = delete;

  // Adds the connection from a rank.  Closing it removes it.  Throws ConnectionLost if the kernel can't watch it.
  void add(int descriptor, int rank);
  // False while there are few connections: reading from each of them is as fast.
  bool is_asked() const { return descriptor_ >= 0; }
  // Returns for each rank whether there is data.  Data that isn't read is reported again.
  const std::vector<char>& ask();

 private:
  void register_one(int descriptor, int rank);

  int descriptor_ = -1;
  std::vector<std::pair<int, int>> few_;  // descriptors and ranks, while there are few
  size_t count_ = 0;
  std::vector<char> ready_;
};

}  // namespace cpulaunch
