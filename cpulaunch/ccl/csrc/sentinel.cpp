#include "sentinel.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace cpulaunch {

namespace {

constexpr auto kRound = std::chrono::milliseconds(200);
// A peer that ended after its last collective may have left behind all that the others still need.
constexpr auto kGrace = std::chrono::seconds(2);
// How often a heartbeat is written and listened to, and after how long a host counts as gone.
constexpr auto kBeat = std::chrono::seconds(1);
constexpr auto kSilence = std::chrono::seconds(15);
constexpr char kFailureKey[] = "failure";

}  // namespace

struct Sentinel::Watched {
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
  uint64_t beats = 0;
  Clock::time_point beaten{};
  Clock::time_point listened{};
  std::string heard;
  Clock::time_point changed = Clock::now();
  std::atomic<Clock::time_point> asking{Clock::time_point::max()};  // since when the store owes an answer
  Clock::time_point alerted{};
  std::string suspicion;
  Clock::time_point suspected{};
  bool told = false;

  void suspect(std::string what) {
    if (what.empty() || !suspicion.empty()) return;
    suspicion = std::move(what);
    suspected = Clock::now();
  }

  // "" when all local peers live.
  std::string ended() const {
    for (const auto& process : processes) {
      pollfd entry{process.descriptor, POLLIN, 0};
      if (::poll(&entry, 1, 0) == 1) return c10::str("rank ", process.rank, " of this group, on this host, has ended");
    }
    return "";
  }

  void beat() {
    if (heartbeat.own.empty() || Clock::now() - beaten < kBeat) return;
    beaten = Clock::now();
    try {
      const auto text = std::to_string(++beats);
      store->set(heartbeat.own, std::vector<uint8_t>(text.begin(), text.end()));
    } catch (const std::exception&) {
      heartbeat.own.clear();  // the store is gone
    }
  }

  // Throws when the store is gone.
  void listen() {
    const auto now = Clock::now();
    if (heartbeat.next.empty() || now - listened < kBeat) return;
    listened = now;
    std::string text;
    if (store->check({heartbeat.next})) {
      const auto value = store->get(heartbeat.next);
      text.assign(value.begin(), value.end());
    }
    if (text != heard) {
      heard = std::move(text);
      changed = now;
    } else if (now - changed > kSilence) {
      suspect(c10::str("host ", heartbeat.next_host, " has given no sign of life for ", kSilence.count(), " s"));
    }
  }

  void look(GroupState& state) {
    suspect(ended());
    // Not with a suspicion: the store may be gone too, which torch reports at length.
    if (suspicion.empty()) {
      asking = Clock::now();
      try {
        listen();
        if (store->check({kFailureKey})) {
          const auto text = store->get(kFailureKey);
          state.fail(std::string(text.begin(), text.end()));
        }
      } catch (const std::exception&) {
        told = true;  // as far as possible
        suspect("the group's store cannot be reached: the process that holds it, mostly rank 0, has ended");
      }
      asking = Clock::time_point::max();
    }
    if (!suspicion.empty() && Clock::now() - suspected > kGrace) state.fail(suspicion);
  }

  void tell(const GroupState& state) {
    if (told) return;
    told = true;
    try {
      const auto text = c10::str("rank ", state.rank, " failed: ", state.reason());
      store->set(kFailureKey, std::vector<uint8_t>(text.begin(), text.end()));
    } catch (const std::exception&) {
      // Nobody is left to be told.
    }
  }
};

Sentinel& Sentinel::instance() {
  static auto* sentinel = new Sentinel;
  return *sentinel;
}

void Sentinel::add(const std::shared_ptr<GroupState>& group, c10::intrusive_ptr<c10d::Store> store,
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
  const bool beats = !watched->heartbeat.own.empty();
  groups_[group.get()] = std::move(watched);
  if (beats) wake();
}

void Sentinel::remove(const GroupState* group) {
  std::lock_guard<std::mutex> lock(mutex_);
  groups_.erase(group);
}

void Sentinel::alert(const std::shared_ptr<GroupState>& group) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(group.get());
  if (found == groups_.end()) return;
  const auto now = Clock::now();
  found->second->alerted = now;
  const auto asking = found->second->asking.load();
  if (asking < now && now - asking > kSilence) {
    group->fail(c10::str("the group's store has not answered for ", kSilence.count(),
                         " s: the host that holds it, mostly rank 0's, cannot be reached"));
  }
  wake();
}

// With the lock held.
void Sentinel::wake() {
  if (!running_) {
    running_ = true;
    std::thread([this] { run(); }).detach();
  }
  wake_.notify_one();
}

std::string Sentinel::ended_peer(const GroupState* group) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(group);
  return found == groups_.end() ? "" : found->second->ended();
}

void Sentinel::run() {
  pthread_setname_np(pthread_self(), "cpulaunch-watch");
  for (;;) {
    std::vector<std::shared_ptr<Watched>> alerted, beating;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      for (const auto& entry : groups_) {
        if (Clock::now() - entry.second->alerted < std::chrono::seconds(1)) alerted.push_back(entry.second);
        if (!entry.second->heartbeat.own.empty()) beating.push_back(entry.second);
      }
      if (alerted.empty() && beating.empty()) {
        wake_.wait(lock);
        continue;
      }
    }
    // Without the lock: a store whose host is gone may block for long.
    for (const auto& watched : beating) watched->beat();
    for (const auto& watched : alerted) {
      const auto state = watched->group.lock();
      if (!state) continue;
      if (!state->failed()) watched->look(*state);
      if (state->failed()) watched->tell(*state);
    }
    std::this_thread::sleep_for(kRound);
  }
}

}  // namespace cpulaunch
