// A network between ranks that share one thread.  Everything that ranks send in a round arrives at its end, so a
// collective takes the same rounds, messages and bytes in every run.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <set>
#include <vector>

#include "network.hpp"

namespace cpulaunch {

class Lockstep {
 public:
  struct Sent {
    uint64_t messages = 0, bytes = 0;
    std::set<int> peers;  // ranks to which it has sent, or from which it has expected something
  };

  explicit Lockstep(int ranks) : sent(ranks), inboxes_(ranks) {}

  std::unique_ptr<Network> network(int rank);
  // Delivers what has been sent.  Returns false if nothing was under way.
  bool deliver();

  std::vector<Sent> sent;  // by each rank

 private:
  class OfRank;
  struct Message {
    int from, to;
    Tag tag;
    std::vector<char> data;
  };

  std::vector<Message> under_way_;
  std::vector<std::list<Message>> inboxes_;  // of each rank
};

}  // namespace cpulaunch
