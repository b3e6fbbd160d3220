#include "watchdog.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace cpulaunch {

namespace {

// The time between two looks: a failure shows within a second, and a rank that waits queries the store five times a
// second.
constexpr auto kInterval = std::chrono::milliseconds(200);
// The watchdog looks after a group for so long after an alert.  Whoever waits alerts it every few milliseconds.
constexpr auto kAlertTime = std::chrono::seconds(1);
// The time from a suspicion to the failure: a peer that ended after its last operation may have left behind all that
// the others still need.
constexpr auto kGracePeriod = std::chrono::seconds(2);
// How often a heartbeat is written and read ...
constexpr auto kHeartbeatInterval = std::chrono::seconds(1);
// ... and after how long without one, or without an answer of the store, a host counts as gone.  A busy host may
// delay a thread by seconds.
constexpr auto kHeartbeatTimeout = std::chrono::seconds(15);
constexpr char kFailureKey[] = "failure";

}  // namespace

struct Watchdog::Watched {
  struct Process {
    int rank;
    int descriptor;
  };

  ~Watched() {
    for (const auto& process : processes) close(process.descriptor);
  }

  std::weak_ptr<GroupState> group;
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<Process> processes;
  Heartbeat heartbeat;
  uint64_t heartbeats = 0;  // written so far
  Clock::time_point written{};
  Clock::time_point read{};
  std::string last_value;  // of the next host's heartbeat
  Clock::time_point last_change = Clock::now();
  // When the query of the store began that has not been answered yet; max() without one.
  std::atomic<Clock::time_point> query_began{Clock::time_point::max()};
  Clock::time_point alerted{};
  std::string callers_suspicion;  // under the watchdog's lock
  std::string suspicion;
  Clock::time_point suspected{};
  bool reported = false;  // this rank's failure, in the store

  void suspect(std::string what) {
    if (what.empty() || !suspicion.empty()) return;
    suspicion = std::move(what);
    suspected = Clock::now();
  }

  // Says which local peer has ended; "" when all live.
  std::string ended() const {
    for (const auto& process : processes) {
      pollfd entry{process.descriptor, POLLIN, 0};
      if (::poll(&entry, 1, 0) == 1) return c10::str("rank ", process.rank, " of this group, on this host, has ended");
    }
    return "";
  }

  void write_heartbeat() {
    if (heartbeat.own_key.empty() || Clock::now() - written < kHeartbeatInterval) return;
    written = Clock::now();
    try {
      const auto text = std::to_string(++heartbeats);
      store->set(heartbeat.own_key, std::vector<uint8_t>(text.begin(), text.end()));
    } catch (const std::exception&) {
      heartbeat.own_key.clear();  // the store is gone
    }
  }

  // Throws when the store is gone.
  void read_heartbeat() {
    const auto now = Clock::now();
    if (heartbeat.next_key.empty() || now - read < kHeartbeatInterval) return;
    read = now;
    std::string text;
    if (store->check({heartbeat.next_key})) {
      const auto value = store->get(heartbeat.next_key);
      text.assign(value.begin(), value.end());
    }
    if (text != last_value) {
      last_value = std::move(text);
      last_change = now;
    } else if (now - last_change > kHeartbeatTimeout) {
      suspect(c10::str("host ", heartbeat.next_host, " has given no sign of life for ", kHeartbeatTimeout.count(),
                       " s"));
    }
  }

  void look(GroupState& state) {
    suspect(ended());
    // With a suspicion the store is left alone: it may be gone too, which torch reports at length.
    if (suspicion.empty()) {
      query_began = Clock::now();
      try {
        read_heartbeat();
        if (store->check({kFailureKey})) {
          const auto text = store->get(kFailureKey);
          state.fail(std::string(text.begin(), text.end()));
        }
      } catch (const std::exception&) {
        reported = true;  // as far as possible
        suspect("the group's store cannot be reached: the process that holds it, mostly rank 0, has ended");
      }
      query_began = Clock::time_point::max();
    }
    if (!suspicion.empty() && Clock::now() - suspected > kGracePeriod) state.fail(suspicion);
  }

  void report(const GroupState& state) {
    if (reported) return;
    reported = true;
    try {
      const auto text = c10::str("rank ", state.rank, " failed: ", state.reason());
      store->set(kFailureKey, std::vector<uint8_t>(text.begin(), text.end()));
    } catch (const std::exception&) {
      // Nobody is left who could read it.
    }
  }
};

Watchdog& Watchdog::instance() {
  static auto* watchdog = new Watchdog;
  return *watchdog;
}

void Watchdog::add(const std::shared_ptr<GroupState>& group, c10::intrusive_ptr<c10d::Store> store,
                   const std::vector<Peer>& local_peers, Heartbeat heartbeat) {
  auto watched = std::make_shared<Watched>();
  watched->group = group;
  watched->store = std::move(store);
  for (const auto& peer : local_peers) {
    const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0));
    if (descriptor >= 0) watched->processes.push_back({peer.rank, descriptor});
  }
  watched->heartbeat = std::move(heartbeat);
  std::lock_guard<std::mutex> lock(mutex_);
  const bool writes = !watched->heartbeat.own_key.empty();
  groups_[group.get()] = std::move(watched);
  if (writes) wake();
}

void Watchdog::remove(const GroupState* group) {
  std::lock_guard<std::mutex> lock(mutex_);
  groups_.erase(group);
}

void Watchdog::alert(const std::shared_ptr<GroupState>& group, std::string suspicion) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(group.get());
  if (found == groups_.end()) return;
  const auto now = Clock::now();
  found->second->alerted = now;
  if (!suspicion.empty()) found->second->callers_suspicion = std::move(suspicion);
  const auto query_began = found->second->query_began.load();
  if (query_began < now && now - query_began > kHeartbeatTimeout) {
    group->fail(c10::str("the group's store has not answered for ", kHeartbeatTimeout.count(),
                         " s: the host that holds it, mostly rank 0's, cannot be reached"));
  }
  wake();
}

// With the lock held.
void Watchdog::wake() {
  if (!running_) {
    running_ = true;
    std::thread([this] { run(); }).detach();
  }
  wake_.notify_one();
}

std::string Watchdog::ended_peer(const GroupState* group) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(group);
  return found == groups_.end() ? "" : found->second->ended();
}

void Watchdog::run() {
  pthread_setname_np(pthread_self(), "cpulaunch-watch");
  for (;;) {
    std::vector<std::shared_ptr<Watched>> alerted, writing;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      for (const auto& entry : groups_) {
        if (Clock::now() - entry.second->alerted < kAlertTime) alerted.push_back(entry.second);
        entry.second->suspect(entry.second->callers_suspicion);
        if (!entry.second->heartbeat.own_key.empty()) writing.push_back(entry.second);
      }
      if (alerted.empty() && writing.empty()) {
        wake_.wait(lock);
        continue;
      }
    }
    // Without the lock: a store whose host is gone may block for long.
    for (const auto& watched : writing) watched->write_heartbeat();
    for (const auto& watched : alerted) {
      const auto state = watched->group.lock();
      if (!state) continue;
      if (!state->failed()) watched->look(*state);
      if (state->failed()) watched->report(*state);
    }
    std::this_thread::sleep_for(kInterval);
  }
}

}  // namespace cpulaunch
