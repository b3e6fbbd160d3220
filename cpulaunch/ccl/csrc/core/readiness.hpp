// Which of many connections have something to read: one call of the kernel asks for all.

#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace cpulaunch {

class Readiness {
 public:
  Readiness() = default;
  ~Readiness();
  Readiness(const Readiness&) = delete;
  Readiness& operator=(const Readiness&) = delete;

  // A connection from a rank, which leaves by itself when it is closed.  Of a few, nothing is asked.  Throws
  // ConnectionLost where the kernel has no room for it.
  void add(int descriptor, int rank);
  bool is_asked() const { return descriptor_ >= 0; }
  // Asks, and says of each rank up to `ranks` whether there is something.  What isn't read is there again next time.
  const std::vector<char>& ask(size_t ranks);

 private:
  void register_one(int descriptor, int rank);

  int descriptor_ = -1;
  std::vector<std::pair<int, int>> few_;  // while there are few: descriptors and ranks
  size_t count_ = 0;
  std::vector<char> ready_;
};

}  // namespace cpulaunch
