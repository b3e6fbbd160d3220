// A way between hosts other than the hierarchy's own network, such as libfabric to fast network cards.

#pragma once

#include <cstddef>
#include <memory>

#include "arithmetic.hpp"
#include "transfer.hpp"

namespace cpulaunch {

class Fabric {
 public:
  virtual ~Fabric() = default;

  // Starts to reduce `data` in place, over the ranks that have this lane: one of each host.  They start the same
  // reductions of a lane in the same order.  A test() of one transfer moves the others on, too.  Throws std::exception
  // where it cannot be started.
  virtual std::unique_ptr<Transfer> reduce(int lane, char* data, size_t bytes, NumberType type,
                                           Reduction reduction) = 0;
};

}  // namespace cpulaunch
