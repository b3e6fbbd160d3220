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
  bool shared_memory = false;      // a tensor in shared memory is reduced where it is (shared_blocks.hpp)
  int compressing_hosts = 0;       // the number of hosts between which sums go as Wire says; 0: they go as they are
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
  // Returns when the other ranks have got what this one has sent them.  Nothing is in flight, nor is started any more.
  virtual void leave() {}
  // Nothing is in flight, or else `in_flight`: then what an operation may still use must stay.
  virtual void close(bool in_flight) = 0;

  const Abilities abilities;
};

}  // namespace cpulaunch
