// Whether other processes live, without asking them anything.

#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "clock.hpp"

namespace cpulaunch {

// All groups share the descriptors of these two; their of() and at() aren't for several threads at once.

// A process on this host, seen through its pidfd, which becomes readable when the process ends, even while it is a
// zombie.
class Process {
 public:
  static std::shared_ptr<Process> of(int pid);

  explicit Process(int pid);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool has_ended() const;
  // The system's error where it can't be watched, else 0.
  int error() const { return descriptor_ < 0 && error_ != ESRCH ? error_ : 0; }

 private:
  const int descriptor_;
  const int error_;  // why there is no descriptor
};

// The process that serves a TCPStore, on whichever host: it has ended when this one's connection to it has.  torch
// reports each request to a store that is gone with pages of C++ frames; who looks here first makes none.
class StoreServer {
 public:
  // The one at this address.
  static std::shared_ptr<StoreServer> at(const std::string& host, uint16_t port);

  // -1: one that never counts as gone.
  explicit StoreServer(int connection, uint16_t port = 0) : connection_(connection), port_(port) {}
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  bool is_gone() const;
  // Lets all connections of this process to it go on soon after an outage, and those of others that it serves.
  void make_patient() const;

  // One query at a time is under way.  While the process is stopped it takes that long.
  void begin_query() { query_began_ = Clock::now(); }
  // Returns how long it took.
  Clock::duration end_query();
  // Whether a query has had no answer for `limit`, and the process's host has said nothing either: the kernel of that
  // acknowledges what comes, also where the process is stopped.
  bool is_silent_for(std::chrono::milliseconds limit);

 private:
  const int connection_;  // a descriptor of this class's own, or -1
  const uint16_t port_;   // 0 where it isn't known
  std::atomic<Clock::time_point> query_began_{Clock::time_point::max()};
  std::atomic<bool> is_asked_{false};  // the kernel, once a second
};

// Where a process of another host can see that this one is there: the kernel completes its connection, also while this
// process is stopped, and resets it when this process ends.
class Beacon {
 public:
  // Listens on this host's address `ip`.  Throws std::runtime_error where it can't.
  explicit Beacon(const std::string& ip);
  ~Beacon();
  Beacon(const Beacon&) = delete;
  Beacon& operator=(const Beacon&) = delete;

  // Such as "10.0.0.7 4711".
  std::string address() const { return address_; }
  // Closes the connections that were made while this process was stopped, and strangers'.
  void close_connections() const;

 private:
  int descriptor_ = -1;
  std::string address_;
};

// A process on another host, seen by a connection to its beacon.
class RemoteProcess {
 public:
  // `address` is its beacon's.  One that counts as gone where that can't be reached.
  explicit RemoteProcess(const std::string& address);
  ~RemoteProcess();
  RemoteProcess(const RemoteProcess&) = delete;
  RemoteProcess& operator=(const RemoteProcess&) = delete;

  // Whether its host's kernel has said within this time that it is there, be it stopped.
  bool is_there(std::chrono::milliseconds within) const;
  // Whether its host's kernel has said that it isn't.
  bool has_ended();

 private:
  int connection_ = -1;
  bool ended_ = false;
};

}  // namespace cpulaunch
