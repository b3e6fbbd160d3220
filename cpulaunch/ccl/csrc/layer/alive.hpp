// C++ wrappers of the core's liveness checks (interface.h).

#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "clock.hpp"
#include "interface.h"

namespace cpulaunch {

template <class Struct, void free(Struct*)>
struct Deleter {
  void operator()(Struct* object) const { free(object); }
};

// A process on this host.
class Process {
 public:
  explicit Process(int pid) : c_(cl_process_of(pid)) {
    if (const int error = cl_process_error(c_.get())) {
      TORCH_WARN_ONCE("ccl: this rank can't watch the processes of others on its host (", std::strerror(error),
                      "): where one ends early, this rank waits until its timeout");
    }
  }

  bool has_ended() const { return cl_process_has_ended(c_.get()); }

 private:
  std::unique_ptr<cl_process, Deleter<cl_process, cl_process_free>> c_;
};

// The process that serves a store.  If the store is no TCPStore, its server never counts as gone.
class StoreServer {
 public:
  explicit StoreServer(c10d::Store& store) {
    auto* prefixed = dynamic_cast<c10d::PrefixStore*>(&store);
    auto* tcp = dynamic_cast<c10d::TCPStore*>(prefixed ? prefixed->getUnderlyingNonPrefixStore().get() : &store);
    c_.reset(tcp ? cl_server_of(tcp->getHost().c_str(), tcp->getPort()) : cl_server_of(nullptr, 0));
  }

  bool is_gone() const { return cl_server_is_gone(c_.get()); }
  void make_patient() const { cl_server_make_patient(c_.get()); }
  void begin_query() { cl_server_begin_query(c_.get()); }
  Clock::duration end_query() { return Clock::duration(cl_server_end_query(c_.get())); }
  bool is_silent_for(std::chrono::milliseconds limit) { return cl_server_is_silent_for(c_.get(), limit.count()); }

 private:
  std::unique_ptr<cl_server, Deleter<cl_server, cl_server_free>> c_;
};

// An address by which processes of other hosts can check that this process still exists.
class Beacon {
 public:
  explicit Beacon(const std::string& ip) : c_(cl_beacon_make(ip.c_str())) {}

  bool is_there() const { return c_ != nullptr; }  // false if this host can't listen on that address
  std::string address() const { return cl_beacon_address(c_.get()); }
  void close_connections() const { cl_beacon_close_connections(c_.get()); }

 private:
  std::unique_ptr<cl_beacon, Deleter<cl_beacon, cl_beacon_free>> c_;
};

// A process on another host, identified by the address of its beacon.
class RemoteProcess {
 public:
  explicit RemoteProcess(const std::string& address) : c_(cl_remote_at(address.c_str())) {}

  bool is_there(std::chrono::milliseconds within) const { return cl_remote_is_there(c_.get(), within.count()); }
  bool has_ended() { return cl_remote_has_ended(c_.get()); }

 private:
  std::unique_ptr<cl_remote, Deleter<cl_remote, cl_remote_free>> c_;
};

}  // namespace cpulaunch
