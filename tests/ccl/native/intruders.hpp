// Makes connections to ranks' sockets that don't come from their peers, or not unchanged.

#pragma once

#include <poll.h>

#include <cstdint>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "connector.hpp"

namespace cpulaunch {

// Connections of programs that have nothing to do with the group: most send nothing, and some send something wrong.
class Strangers {
 public:
  explicit Strangers(const std::vector<Connector::Address>& addresses);
  ~Strangers();
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;

 private:
  std::vector<int> descriptors_;
};

// A proxy between the ranks that changes one of the first bytes of each connection, which announce what will come.
class Garbler {
 public:
  // Changes the addresses, so that the ranks connect to this object.
  Garbler(std::vector<Connector::Address>& addresses, uint64_t seed);
  ~Garbler();  // returns once the ranks have closed their connections
  Garbler(const Garbler&) = delete;
  Garbler& operator=(const Garbler&) = delete;

 private:
  struct Place {
    size_t at;  // the offset of the byte
    char change;
    bool is_there;  // from the opener of the connection to the other rank
  };

  void accept_from(int listener, int port);
  Place place();

  std::mutex mutex_;
  std::mt19937_64 random_;
  std::vector<std::thread> forwarding_;
  std::vector<int> listeners_;
  std::vector<std::thread> accepting_;
};

}  // namespace cpulaunch
