// A way between hosts other than the hierarchy's own network, such as libfabric to fast network cards.
//
// It has lanes (layout.hpp): each connects one rank of each host.  They start the same operations of a lane in the same
// order.  A test() of one transfer moves the others on, too.  What is started throws std::exception where it can't be.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "collective.hpp"
#include "transfer.hpp"

namespace cpulaunch {

class Fabric {
 public:
  using Result = std::unique_ptr<Transfer>;
  using Sizes = std::vector<size_t>;  // bytes, of each host

  virtual ~Fabric() = default;

  // Reduces `data` in place.
  virtual Result reduce(int lane, char* data, size_t bytes, NumberType type, Reduction reduction) = 0;
  virtual Result broadcast(int lane, char* data, size_t bytes, int host) = 0;
  // What each host has goes to all, side by side: this one's is `from`, also there.
  virtual Result gather(int lane, const char* from, char* to, const Sizes& sizes) = 0;
  // What this host has for each one lies side by side, and so does what comes.  It has nothing for itself.
  virtual Result exchange(int lane, const char* from, const Sizes& sent, char* to, const Sizes& received) = 0;
  // Between all ranks of the group: what each has for each other one, of which some have nothing.
  virtual Result exchange_all(const Parts& sent, const Parts& received) = 0;
  // Nothing is in flight.
  virtual void close() {}
};

}  // namespace cpulaunch
