// What carries a group's collectives: cpulaunch's own (transport_own.hpp), or oneCCL (oneccl/transport.hpp).

#pragma once

#include <memory>

#include "collective.hpp"
#include "transfer.hpp"

namespace cpulaunch {

// What a transport can do beside the collectives.
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

  // The ranks start the same collectives in the same order; so one thread at a time may start some.  Averages come
  // divided.  Throws std::exception where it can't be started.
  virtual std::unique_ptr<Transfer> start(const Collective& collective) = 0;
  // Throws Mismatch where it is known that ranks have called different collectives, though none that this rank has
  // called could tell.
  virtual void check_calls() {}
  // Returns when the other ranks have got what this one has sent them.  Nothing is in flight, nor is started any more.
  virtual void leave() {}
  // Nothing is in flight, or else `in_flight`: then what an operation may still use must stay.
  virtual void close(bool in_flight) = 0;

  const Abilities abilities;
};

}  // namespace cpulaunch
