// Finds out whether other processes are alive.  The kernels of their hosts answer, so a stopped process counts as
// alive.

#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "clock.hpp"

namespace cpulaunch {

// All groups share the descriptors of Process and StoreServer.  Their of() and at() are not thread-safe.

// A process on this host.  Its pidfd becomes readable when the process ends, even while it is a zombie.
class Process {
 public:
  static std::shared_ptr<Process> of(int pid);

  explicit Process(int pid);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool has_ended() const;
  // The system's error if the process can't be watched, else 0.
  int error() const { return descriptor_ < 0 && error_ != ESRCH ? error_ : 0; }

 private:
  const int descriptor_;
  const int error_;  // the reason if there is no descriptor
};

// The process that serves a TCPStore, on any host.  It counts as gone once this process's connection to it is broken.
// Check this before each request: torch logs pages of C++ frames about a request to a store that is gone.
class StoreServer {
 public:
  // Returns the server at this address.
  static std::shared_ptr<StoreServer> at(const std::string& host, uint16_t port);

  // With connection -1, the server never counts as gone.
  explicit StoreServer(int connection, uint16_t port = 0) : connection_(connection), port_(port) {}
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  bool is_gone() const;
  // Makes this process's connections to the store recover soon after an outage of the network.  If this process serves
  // the store, that includes the connections from others.
  void make_patient() const;

  // Only one query may be under way at a time.  While the server is stopped, the query waits.
  void begin_query() { query_began_ = Clock::now(); }
  // Returns how long the query took.
  Clock::duration end_query();
  // Whether a query has had no answer for `limit`, and the server's host has acknowledged nothing for as long.  The
  // host's kernel acknowledges packets even while the server is stopped.
  bool is_silent_for(std::chrono::milliseconds limit);

 private:
  const int connection_;  // a duplicate of the connection's descriptor, or -1
  const uint16_t port_;   // 0 if unknown
  std::atomic<Clock::time_point> query_began_{Clock::time_point::max()};
  std::atomic<bool> is_asked_{false};  // whether this kernel probes the server's host once a second
};

// A listening socket by which processes of other hosts can check that this process exists.  The kernel completes their
// connections, even while this process is stopped, and resets them when it ends.
class Beacon {
 public:
  // Listens on this host's address `ip`.  Throws std::runtime_error if that fails.
  explicit Beacon(const std::string& ip);
  ~Beacon();
  Beacon(const Beacon&) = delete;
  Beacon& operator=(const Beacon&) = delete;

  // Such as "10.0.0.7 4711".
  std::string address() const { return address_; }
  // Closes the connections that were made since the last call: by ranks that missed this process's heartbeats, or by
  // strangers.
  void close_connections() const;

 private:
  int descriptor_ = -1;
  std::string address_;
};

// A process on another host, checked by a connection to its beacon.
class RemoteProcess {
 public:
  // `address` is that of the process's beacon.  If it can't be reached, is_there() is false.
  explicit RemoteProcess(const std::string& address);
  ~RemoteProcess();
  RemoteProcess(const RemoteProcess&) = delete;
  RemoteProcess& operator=(const RemoteProcess&) = delete;

  // Whether its host's kernel has shown within this time that the process exists, even if it is stopped.
  bool is_there(std::chrono::milliseconds within) const;
  // Whether its host's kernel has shown that the process has ended.
  bool has_ended();

 private:
  int connection_ = -1;
  bool ended_ = false;
};

}  // namespace cpulaunch
