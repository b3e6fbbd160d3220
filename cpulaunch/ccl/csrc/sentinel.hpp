// Notices that a peer is gone while somebody waits for it.
//
// A local peer is watched through its pidfd, which tells of its end even while it is a zombie.  What
// happens on other hosts is learned through the group's store: the rank that sees a failure writes it
// there, and an unreachable store means that its host is gone.  A host of which no rank is left to write
// is missed: its first rank writes a heartbeat, which the ranks of the host before it listen to.

#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "operation.hpp"

namespace cpulaunch {

struct Peer {
  int rank = 0;
  int pid = 0;  // on this host and in this PID namespace
};

// The keys in the store for a group of several hosts; empty where there is nothing to write, or to hear.
struct Heartbeat {
  std::string own;
  std::string next;
  std::string next_host;  // its name, for people
};

class Sentinel {
 public:
  static Sentinel& instance();

  // `store` is used from the sentinel's thread only.
  void add(const std::shared_ptr<GroupState>& group, c10::intrusive_ptr<c10d::Store> store,
           const std::vector<Peer>& local_peers, Heartbeat heartbeat);
  void remove(const GroupState* group);

  // Somebody has been waiting for a while: look after this group for the next second.
  void alert(const std::shared_ptr<GroupState>& group);

  // Which local peer of the group has ended, in words; "" when none has.
  std::string ended_peer(const GroupState* group);

 private:
  struct Watched;

  void wake();
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<const GroupState*, std::shared_ptr<Watched>> groups_;
  bool running_ = false;
};

}  // namespace cpulaunch
