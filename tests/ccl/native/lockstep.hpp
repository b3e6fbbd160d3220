// A network between ranks of one thread, in which all that ranks send in a round arrives at the round's end.  So the
// rounds, messages and bytes of a collective are the same in each run, whatever the machine does meanwhile.

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
    std::set<int> peers;  // whom it has sent something, or expected something from
  };

  explicit Lockstep(int ranks) : sent(ranks), inboxes_(ranks) {}

  std::unique_ptr<Network> network(int rank);
  // What has been sent arrives.  False where nothing was under way.
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
