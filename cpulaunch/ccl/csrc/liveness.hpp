// Whether other processes live, without asking them anything.

#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace cpulaunch {

// All groups share the descriptors of these two; their of() isn't for several threads at once.

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

 private:
  const int descriptor_;
  const int error_;  // why there is no descriptor
};

// The process that serves a TCPStore, on whichever host: it has ended when this one's connection to it has.  torch
// reports each request to a store that is gone with pages of C++ frames; who looks here first makes none.
class StoreServer {
 public:
  // That of `store`; one that never counts as gone where `store` is of another kind.
  static std::shared_ptr<StoreServer> of(c10d::Store& store);

  explicit StoreServer(int connection) : connection_(connection) {}
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  bool is_gone() const;

 private:
  const int connection_;  // a descriptor of this class's own, or -1
};

}  // namespace cpulaunch
