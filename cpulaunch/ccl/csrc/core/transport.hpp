// The interface of transports, which carry a group's collectives: cpulaunch's own (transport_own.hpp), or oneCCL
// (oneccl/transport.hpp).

#pragma once

#include <memory>

#include "collective.hpp"
#include "transfer.hpp"

namespace cpulaunch {

// What a transport can do besides the collectives.
struct Abilities {
  bool messages = false;
  bool bitwise = false;            // reductions
  bool shared_memory = false;      // tensors in shared memory are reduced in place (shared_blocks.hpp)
  int compressing_hosts = 0;       // the number of hosts between which Wire applies; 0: Wire is ignored
};

class Transport {
 public:
  explicit Transport(Abilities abilities) : abilities(abilities) {}
  virtual ~Transport() = default;

  // Starts a collective.  All ranks must start the same ones in the same order, so only one thread at a time may call
  // this.  The result of an average is divided already.  Throws std::exception if it can't be started.
  virtual std::unique_ptr<Transfer> start(const Collective& collective) = 0;
  // Throws Mismatch if ranks are known to have called different collectives, although none of this rank's has failed.
  virtual void check_calls() {}
  // Returns whether the other ranks have received what this rank has sent; call it until they have.  Nothing may be in
  // flight, or start later.
  virtual bool leave() { return true; }
  // If operations are still `in_flight`, the memory that they may use must stay.
  virtual void close(bool in_flight) = 0;

  const Abilities abilities;
};

}  // namespace cpulaunch
