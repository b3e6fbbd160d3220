// What may come to a rank's socket beside the connections of its peers.

#pragma once

#include <poll.h>

#include <cstdint>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "connector.hpp"

namespace cpulaunch {

// Connections of programs that have nothing to do with the group: most say nothing, some say something else.
class Strangers {
 public:
  explicit Strangers(const std::vector<Connector::Address>& addresses);
  ~Strangers();
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;

 private:
  std::vector<int> descriptors_;
};

// Stands between the ranks and changes a byte of each connection, among the first ones, which say what will come.
class Garbler {
 public:
  // The ranks connect to it instead: it changes the addresses.
  Garbler(std::vector<Connector::Address>& addresses, uint64_t seed);
  ~Garbler();  // once the ranks have closed their connections
  Garbler(const Garbler&) = delete;
  Garbler& operator=(const Garbler&) = delete;

 private:
  struct Place {
    size_t at;  // of the byte
    char change;
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
