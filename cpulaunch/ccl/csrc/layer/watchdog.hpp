// Notices that a peer is gone while this rank waits for it.
//
// The watchdog watches a peer on this host through its pidfd, which becomes readable when the process ends, even
// while it is a zombie.  From other hosts it learns through the group's store: the rank that sees a failure reports
// it there.  The store ends with rank 0, which may have done its part: then nothing more is heard of other hosts, and
// only who can't say whom it needs takes that for a failure.  A host that loses all its ranks at once cannot
// report anything.  So the first rank of each host writes a heartbeat to the store, and the ranks of the host before
// it read that.
//
// A process that is stopped, by SIGSTOP or a debugger, gives no answer and no heartbeat, and is not gone: its host's
// kernel says so, on the connection to the store and on one to the beacon of who writes no heartbeat.
//
// A rank knows whom it waits for itself, but that one may be waiting, too.  A rank that has waited for long therefore
// says in the store for whom, and what it calls, and follows from one to the next up to those who don't wait.

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

// The keys in the store for a group of several hosts; a key is empty where this rank has nothing to write or read.  A
// process has one key in all its groups, so that groups that come and go leave nothing behind.
struct Heartbeat {
  std::string own_key;
  std::string own_ip;     // this host's address for the others; "" where it has none
  std::string next_key;
  std::string next_host;  // its name, for messages
};

// For looking into a group's store: the more ranks it has, the more rarely each looks.
struct StoreIntervals {
  Milliseconds look;       // for failures; and for who waits for whom, where it is no less than a second
  Milliseconds heartbeat;  // for writing and reading one
  Milliseconds timeout;    // without a heartbeat or an answer, after which a host counts as gone: `silence` at least

  StoreIntervals(Milliseconds look, Milliseconds silence);
};

class Watchdog {
 public:
  static Watchdog& instance();

  // The watchdog's thread makes a connection of its own to `store` when it first needs one.
  void add(const std::shared_ptr<GroupState>& group, c10::intrusive_ptr<c10d::Store> store,
           const std::vector<Peer>& local_peers, Heartbeat heartbeat, StoreIntervals intervals);
  // A failure of the group is reported nevertheless.
  void remove(const GroupState* group);

  // Has the watchdog look after this group for the next second: an operation of it has taken long.  `suspicion` is
  // what tells the caller that a peer is gone; empty when nothing does.  `needed` are the ranks of this host without
  // which it can't go on, or -1 where any one will do; nullopt: all of the group.  Whoever waits calls this every few
  // milliseconds.
  void alert(const std::shared_ptr<GroupState>& group, const Cause& suspicion = Cause(),
             std::optional<std::set<int>> needed = std::nullopt);

  // Has the watchdog tell the others what this rank calls, while it waits for `ranks`, such as "1, 3", or "" where it
  // may be any.  If it `asks`, the watchdog finds out which ranks are late or call something else, and tells the group.
  void say_what_waits(const GroupState* group, uint64_t sequence, std::string ranks, Said said, bool asks);

  // For the end of the process: gives the other ranks time to learn of a failure, as the store may end with it.
  void linger();

  // Says which local peer of the group has ended; empty when none has.
  Cause ended_peer(const GroupState* group);

 private:
  struct Watched;
  struct Waiting {  // this rank
    uint64_t sequence;  // in the operation with this number
    std::string ranks;  // for these
    Said said;
    bool asks;  // for the cause
  };
  struct Need {  // whom callers need
    std::set<int> peers;
    bool all = false;
  };
  struct Alert {  // what callers have said since the last look into the store
    bool needs_all = false;
    std::optional<Waiting> waiting;
  };
  struct Pulse {  // of this process, for whichever groups
    Clock::time_point written{};  // when last
    uint64_t count = 0;
    std::unique_ptr<Beacon> beacon;
  };

  void wake();
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<const GroupState*, std::shared_ptr<Watched>> groups_;
  bool running_ = false;
  std::optional<Clock::time_point> failed_;  // when a group first did
  // The watchdog's thread only:
  std::map<std::string, Pulse> pulses_;  // by their keys
};

}  // namespace cpulaunch
