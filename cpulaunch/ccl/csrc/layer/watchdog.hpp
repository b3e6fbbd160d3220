// Detects that a peer is gone while this rank waits for it.
//
// The watchdog watches a peer on this host through its pidfd, which becomes readable when the process ends, even
// while it is a zombie.  It learns of failures on other hosts through the group's store, where the rank that detects a
// failure reports it.  The store ends with rank 0, which may exit once its part is done.  From then on, this rank no
// longer learns about other hosts.  It treats that as a failure only if an operation can't say which ranks it needs.
//
// A host that loses all its ranks at once cannot report anything.  So the first rank of each host writes a heartbeat to
// the store, and the ranks of the host before it read the heartbeat.
//
// A process that is stopped, by SIGSTOP or a debugger, neither answers nor writes heartbeats, but it is not gone.  Its
// host's kernel shows that: it still acknowledges packets on the connection to the store, and on a connection to the
// beacon of a process whose heartbeats are missing.
//
// A rank knows which peer it waits for, but that peer may be waiting, too.  So a rank that has waited for long writes
// to the store what it calls and which ranks it waits for.  It then follows such records from rank to rank until it
// reaches ranks that do not wait.

#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "alive.hpp"
#include "work.hpp"

namespace cpulaunch {

struct Peer {
  int rank = 0;
  int pid = 0;  // on this host and in this PID namespace
};

// The heartbeat's keys in the store of a group of several hosts.  A key is empty if this rank does not write or read
// that heartbeat.  A process uses the same key in all its groups, so short-lived groups leave nothing behind.
struct Heartbeat {
  std::string own_key;
  std::string own_ip;     // the address at which other hosts reach this one; "" if there is none
  std::string next_key;
  std::string next_host;  // the next host's name, for messages
};

// How often a rank accesses a group's store: the more ranks the group has, the less often.
struct StoreIntervals {
  Milliseconds look;       // between checks for failures; if over a second, also between searches for late ranks
  Milliseconds heartbeat;  // between heartbeats, for writing and for reading
  Milliseconds timeout;    // a host without a heartbeat or an answer for this time counts as gone; at least `silence`

  StoreIntervals(Milliseconds look, Milliseconds silence);
};

class Watchdog {
 public:
  static Watchdog& instance();

  // The watchdog's thread opens its own connection to `store` when it first needs one.
  void add(const std::shared_ptr<GroupState>& group, c10::intrusive_ptr<c10d::Store> store,
           const std::vector<Peer>& local_peers, Heartbeat heartbeat, StoreIntervals intervals);
  // If the group has failed, its failure is still reported.
  void remove(const GroupState* group);

  // Makes the watchdog check this group for the next second, because an operation has taken long.  A thread that waits
  // calls this every few milliseconds.
  //
  // `suspicion` is the caller's evidence that a peer is gone, or empty.  `needed` lists the ranks of this host that the
  // operation needs; -1 in it means any one rank, and nullopt means all ranks of the group.
  void alert(const std::shared_ptr<GroupState>& group, const Cause& suspicion = Cause(),
             std::optional<std::set<int>> needed = std::nullopt);

  // Makes the watchdog publish this rank's call and the `ranks` that it waits for, such as "1, 3"; "" means any rank.
  // If `asks`, the watchdog also finds out which ranks are late or call something else, and stores the result in the
  // group's state (GroupState::set_delay).
  void publish_wait(const GroupState* group, uint64_t sequence, std::string ranks, CallSummary call, bool asks);

  // Called when the process ends: gives the other ranks time to learn of a failure, because the store may end with this
  // process.
  void linger();

  // Returns which local peer of the group has ended; empty if none has.
  Cause ended_peer(const GroupState* group);

 private:
  struct Watched;
  struct Wait {  // an operation in which this rank waits
    uint64_t sequence;
    std::string ranks;  // the ranks it waits for
    CallSummary call;
    bool asks;  // whether the watchdog is to find the cause
  };
  struct Need {  // the ranks that callers need
    std::set<int> peers;
    bool all = false;
  };
  struct Alert {  // collected from callers since the last look into the store
    bool needs_all = false;
    std::optional<Wait> wait;
  };
  struct Pulse {  // this process's heartbeat, which its groups share
    Clock::time_point written{};  // last time
    uint64_t count = 0;
    std::unique_ptr<Beacon> beacon;
  };

  void wake();
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<const GroupState*, std::shared_ptr<Watched>> groups_;
  bool running_ = false;
  std::optional<Clock::time_point> failed_;  // the time of the first failure of a group
  // Used by the watchdog's thread only:
  std::map<std::string, Pulse> pulses_;  // by key in the store
};

}  // namespace cpulaunch
