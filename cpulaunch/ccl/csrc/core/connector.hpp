// Opens and accepts the TCP connections of a rank (connection.hpp).

#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "connection.hpp"

namespace cpulaunch {

constexpr size_t kLeastKey = 16;  // bytes of a group's key

// Used by several threads.
class Connector {
 public:
  // The port is 0 for ranks to which nothing is sent, such as those of this host.
  struct Address {
    std::string ip;
    int port = 0;
    std::string from = {};  // this host's address for connections to it; empty: the kernel chooses
  };
  struct Listener {
    int descriptor;
    int port;
  };
  // Listens on this host's address `ip`.  Throws std::runtime_error if the host has no such address, or no free port.
  static Listener listen(const std::string& ip);
  // From now on, this process listens on the first free port from `first` to `last`, or on any port if these are 0.
  static void listen_within(int first, int last);
  // Returns the descriptor of a connection that is being made.  Throws std::runtime_error if that fails at once.
  static int reach(const Address& to);
  // If the ranks of a host have several addresses (several interfaces), this rank connects to another host's second
  // address from its own host's second address, and so on.  From the first address, data would leave by one interface
  // while acknowledgements arrive by another, and many kernels drop such packets (rp_filter).
  static void choose_sources(std::vector<Address>& addresses, const std::vector<int>& host_of, int rank);

  // Takes the listener over.  `addresses` has an item for each rank of the group.  `key` is the group's secret, of at
  // least kLeastKey bytes.  Each rank opens up to `channels` connections to this one.
  Connector(int rank, Listener listener, std::vector<Address> addresses, std::string key, size_t channels = 2);
  ~Connector() { close(); }
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  bool is_lower_than(int rank) const { return rank_ < rank; }
  // Throws ConnectionLost if the rank can't be reached.
  Connection connect(int to, Channel channel);
  // Accepts new connections.  Throws ConnectionLost if this process may not have more descriptors.
  void look();
  // Returns the connection that another rank has opened; it is not open if there is none yet.
  Connection take(int from, Channel channel);
  void close();

 private:
  struct Unknown {  // a connection whose hello has not fully come
    Socket socket;
    bool is_near;  // it comes from an address of the group's
    Clock::time_point since = Clock::now();
    size_t done = 0;
    Hello hello{};
  };

  bool make_room();
  bool read_hello(Unknown& unknown);
  bool is_of_group(const sockaddr_storage& address) const;

  const int rank_;
  const std::vector<Address> addresses_;
  const std::string key_;
  const size_t channels_;
  std::mutex mutex_;
  Listener listener_;
  std::vector<Unknown> unknown_;
  std::map<std::pair<int, Channel>, Socket> known_;  // connections that take() has not returned yet
  std::set<std::pair<int, Channel>> greeted_;        // all connections so far: a second one is refused
};

}  // namespace cpulaunch
