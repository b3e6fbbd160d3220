// Several TCP connections between two ranks, which threads of communication drive at the same time.
//
// One connection carries no more than a thread copies, and often less.  So there are k networks, each with connections
// of its own.  The pieces of an operation take turns on the k connections of two ranks.  A large message is cut into
// stripes, one for each connection.  The first connection of two ranks is in another network for each host, so that the
// networks share small messages, too.
//
//     k = 2       to host 0                         to host 1
//   network 0     pieces 0, 2, ...; first stripe    pieces 1, 3, ...; second stripe
//   network 1     pieces 1, 3, ...; second stripe   pieces 0, 2, ...; first stripe
//
// All ranks of a group have the same k, so both ends choose the same connection for a message, or cut it alike.  A
// header has the size of the whole message, so the first stripe is enough to compare sizes.
//
// Each network's state is touched by one thread at a time: by the thread that calls a function of this class, or within
// progress(), by one thread of the team that the caller has lent (team.hpp).  Without a team, the caller drives the
// networks in turn.

#pragma once

#include <memory>
#include <vector>

#include "layout.hpp"
#include "network_tcp.hpp"

namespace cpulaunch {

class StripedNetwork final : public Network {
 public:
  StripedNetwork(const Layout& layout, const std::shared_ptr<Connector>& connector, size_t networks);

  void send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes, int& pending,
            bool more_follow = false) override;
  void receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes, int& pending) override;
  void enter(const Signature& signature) override;
  size_t progress() override;
  void check_unasked() override;
  bool may_get_unasked() const override { return networks_[0]->may_get_unasked(); }
  const Cause& lost() override;
  std::vector<int> awaited() const override;
  bool leave() override;
  void close() override;

 private:
  TcpNetwork& network_of(int rank, size_t stripe) {
    return *networks_[(hosts_[rank] + stripe) % networks_.size()];
  }
  // Calls `act` with the network and the range of each stripe of a message; one that is not large is one stripe.
  template <class Act>
  void for_each_stripe(int rank, const Tag& tag, size_t bytes, const Act& act);
  size_t threads_for_progress() const;

  const std::vector<int> hosts_;  // the number of each rank's host
  std::vector<std::unique_ptr<TcpNetwork>> networks_;
  std::vector<size_t> moved_;    // by each network in the last call of progress()
  unsigned idle_calls_ = 0;      // of progress(), since something has moved
};

// Returns the network of a group whose ranks have this many connections for collectives to each rank of another host.
std::unique_ptr<Network> make_tcp_network(const Layout& layout, const std::shared_ptr<Connector>& connector,
                                          size_t connections);

}  // namespace cpulaunch
