#include "watchdog.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <c10/util/FunctionRef.h>

namespace cpulaunch {

namespace {

// The time between two checks of local peers.
constexpr auto kInterval = std::chrono::milliseconds(200);
// How long the watchdog checks a group after an alert.  A waiting thread alerts it every few milliseconds.
constexpr auto kAlertTime = std::chrono::seconds(1);
// The time between a suspicion and the failure.  A peer that ended after its last operation may have left behind
// everything that the others still need, and they will notice that within this time.
constexpr auto kGracePeriod = std::chrono::seconds(2);
// The shortest time between two heartbeats.
constexpr auto kHeartbeatInterval = std::chrono::seconds(1);
// A host counts as gone after this many missing heartbeats, at the earliest.
constexpr int kMissingHeartbeats = 5;
// How long linger() waits after a failure.  By then, the watchdogs of waiting ranks have been alerted and have looked
// into the store.
constexpr auto kLingerTime = std::chrono::seconds(1);
constexpr char kFailureKey[] = "failure";  // value: a cl_cause, then the sentence of the rank that found the failure
// The shortest time between two searches for late ranks, and the most ranks whose records a search reads.
constexpr auto kAskInterval = std::chrono::seconds(1);
constexpr size_t kMaxAsked = 16;

std::vector<uint8_t> as_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// Returns "" if the store doesn't have the key.
std::string read_key(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return "";
  const auto value = store.get(key);
  return {value.begin(), value.end()};
}

}  // namespace

StoreIntervals::StoreIntervals(Milliseconds look, Milliseconds silence)
    : look(look),
      heartbeat(std::max<Milliseconds>(look, kHeartbeatInterval)),
      timeout(std::max<Milliseconds>(kMissingHeartbeats * heartbeat, silence)) {}

struct Watchdog::Watched {
  struct LocalPeer {
    int rank;
    Process process;
  };

  Watched(c10::intrusive_ptr<c10d::Store> store, StoreIntervals intervals)
      : intervals(intervals), groups_store(std::move(store)), server(*groups_store) {}

  // For the watchdog's thread only.  Throws if the store can't be reached.
  c10d::Store& store() {
    if (server.is_gone()) throw std::runtime_error("the process that serves the store has ended");
    if (!own_store) {
      own_store = groups_store->clone();
      server.make_patient();
    }
    return *own_store;
  }
  // The store without the group's prefix: all groups share its keys.
  c10d::Store& heartbeats() {
    auto* prefixed = dynamic_cast<c10d::PrefixStore*>(&store());
    return prefixed ? *prefixed->getUnderlyingNonPrefixStore() : store();
  }

  const StoreIntervals intervals;
  std::weak_ptr<GroupState> group;
  std::shared_ptr<GroupState> removed;  // keeps a removed group until its failure is reported
  const c10::intrusive_ptr<c10d::Store> groups_store;
  StoreServer server;
  c10::intrusive_ptr<c10d::Store> own_store;
  std::vector<LocalPeer> local_peers;
  Heartbeat heartbeat;
  Clock::time_point looked{};                 // last look into the store
  bool store_is_lost = false;
  Clock::time_point read{};                   // last read of the next host's heartbeat
  std::string last_value;                     // what was read
  Clock::time_point last_change = Clock::now();
  std::optional<RemoteProcess> next_process;  // the heartbeat's writer, watched after a long silence
  Clock::time_point next_asked{};
  Clock::time_point alerted{};
  Cause callers_suspicion;                // this and the members up to `ended_since`: under the watchdog's lock
  Clock::time_point callers_suspected{};
  Alert alert;
  Need need;
  Clock::time_point looked_after_peers{};
  Cause ended;                            // a local peer that is still needed but has ended
  Clock::time_point ended_since{};
  std::atomic<bool> has_ended{false};     // `ended` is not empty
  Clock::time_point asked{};              // last search for late ranks
  std::optional<uint64_t> published;      // the last operation that this rank has published as waiting
  Cause suspicion;
  Clock::time_point suspected{};
  std::atomic<bool> reported{false};  // the failure is in the store

  void suspect(const Cause& what) {
    if (!suspicion.empty()) return;
    suspicion = what;
    suspected = Clock::now();
  }

  // Stops using the store: it is gone.
  void lose_store() {
    store_is_lost = true;
    heartbeat.own_key.clear();
    reported = true;  // there is nowhere to report to
  }

  // Runs a query of the store, which throws if the store is gone.  Distinguishes a lost store from a slow one.
  void ask(c10::function_ref<void()> question) {
    bool failed = false;
    server.begin_query();
    try {
      question();
    } catch (const std::exception&) {
      failed = true;
    }
    const auto took = server.end_query();
    if (failed && took > intervals.timeout && !server.is_gone()) {
      own_store.reset();  // torch gave up after the store's own timeout; the next query makes a new connection
    } else if (failed) {
      lose_store();
    }
    // While the store did not answer, this rank could not read heartbeats, and other hosts could not write any: that
    // time does not count as their silence.
    if (took > intervals.timeout / CL_SILENT_PARTS) last_change = Clock::now();
  }

  // Returns which needed local peer has ended; empty if all are alive.
  Cause ended_peer(const Need& need, const GroupState& state) const {
    size_t ended = 0;
    Cause last;
    for (const auto& peer : local_peers) {
      if (!peer.process.has_ended()) continue;
      last = Cause(CauseKind::peer_ended, state.members, peer.rank);
      if (need.all || need.peers.count(peer.rank)) return last;
      ++ended;
    }
    // An operation that waits for any rank can go on until all other ranks are gone.
    return need.peers.count(-1) && static_cast<int>(ended) == state.size - 1 ? last : Cause();
  }

  // Fails the group if a needed local peer ended longer ago than the grace period.  Within that period, operations
  // complete that need only what the peer left behind.  Callers run this, because the watchdog's thread may be blocked
  // in the store.
  void look_after_peers(GroupState& state, Clock::time_point now) {
    if (now - looked_after_peers < kInterval) return;
    looked_after_peers = now;
    if (const auto peer = ended_peer(std::exchange(need, {}), state); peer.rank != ended.rank) {
      ended = peer;
      ended_since = now;
      has_ended = !ended.empty();
    }
    if (!ended.empty() && now - ended_since > kGracePeriod) state.fail(ended);
  }

  void write_heartbeat(Pulse& pulse) {
    if (heartbeat.own_key.empty() || Clock::now() - pulse.written < intervals.heartbeat) return;
    pulse.written = Clock::now();
    if (!pulse.beacon && !heartbeat.own_ip.empty()) {
      pulse.beacon = std::make_unique<Beacon>(heartbeat.own_ip);
      if (!pulse.beacon->is_there()) {
        pulse.beacon.reset();
        heartbeat.own_ip.clear();  // while this process is stopped, other hosts will take it for gone
      }
    }
    if (pulse.beacon) pulse.beacon->close_connections();
    const auto text = c10::str(++pulse.count, ' ', pulse.beacon ? pulse.beacon->address() : "");
    ask([&] { heartbeats().set(heartbeat.own_key, as_bytes(text)); });
  }

  // Throws if the store is gone.  The heartbeat's writer may exit before other ranks if they need nothing more from it.
  // So a writer that has exited is suspect only if a caller needs all ranks.  Other callers notice themselves that a
  // rank they need has ended.
  void read_heartbeat(bool needs_all) {
    const auto now = Clock::now();
    if (heartbeat.next_key.empty() || now - read < intervals.heartbeat) return;
    read = now;
    auto text = read_key(heartbeats(), heartbeat.next_key);
    if (text != last_value) {
      last_value = std::move(text);
      last_change = now;
      next_process.reset();
      return;
    }
    const auto silence = now - last_change;
    const auto part = intervals.timeout / CL_SILENT_PARTS;
    const auto address = last_value.find(' ');
    if (silence > part && !next_process && address != std::string::npos) {
      next_process.emplace(last_value.substr(address));
      next_asked = now;
    }
    const bool may_be_there =
        next_process && (now - next_asked <= part || next_process->is_there(intervals.timeout));
    const bool may_end = !needs_all && next_process && next_process->has_ended();
    if (silence > intervals.timeout && !may_be_there && !may_end) {
      Cause cause(CauseKind::host_silent);
      write_text(cause.host, heartbeat.next_host);
      cause.milliseconds = intervals.timeout.count();
      suspect(cause);
    }
  }

  // Publishes this rank's call.  If `own.asks` is true, follows the chain of ranks that wait for each other, until it
  // reaches ranks that do not wait or that call something else.
  void find_late(GroupState& state, const Wait& own) {
    if (!own.asks && published == own.sequence) return;
    if (Clock::now() - asked < std::max<Milliseconds>(kAskInterval, intervals.look)) return;
    asked = Clock::now();
    const auto key = [](int rank) { return c10::str("waiting/", rank); };
    const auto waiting = c10::str(own.sequence, ": ", own.ranks, '\n', own.call.must_agree, '\n', own.call.text);
    store().set(key(state.rank), as_bytes(waiting));
    published = own.sequence;
    if (!own.asks) return;
    auto suspects = suspects_of(own.ranks, state.size);
    std::set<int> known{state.rank};
    std::string late;
    Cause ahead;
    for (; !suspects.empty() && known.size() < kMaxAsked; suspects.pop_front()) {
      const int rank = suspects.front();
      if (!known.insert(rank).second) continue;
      std::istringstream record(read_key(store(), key(rank)));
      std::string waits, must_agree, text;
      std::getline(std::getline(std::getline(record, waits), must_agree), text);
      const auto colon = waits.find(':');
      const auto sequence = colon == std::string::npos ? 0 : std::stoull(waits);
      if (colon == std::string::npos || sequence < own.sequence) {
        late += (late.empty() ? "" : ", ") + std::to_string(rank);
      } else if (sequence == own.sequence && must_agree != own.call.must_agree) {
        state.set_delay(own.sequence, Cause(CauseKind::calls_differ, state.members, rank).with(text));
        return;
      } else {
        if (sequence > own.sequence && ahead.empty()) {
          ahead = Cause(CauseKind::peer_ahead, state.members, rank).with(text);
          ahead.theirs.sequence = sequence;
        }
        const auto next = suspects_of(waits.substr(colon + 1), state.size);
        suspects.insert(suspects.end(), next.begin(), next.end());
      }
    }
    const auto is_known = [&](int rank) { return known.count(rank) > 0; };
    if (late.empty() && ahead.empty() && std::all_of(suspects.begin(), suspects.end(), is_known)) {
      state.set_delay(own.sequence, Cause(CauseKind::data_missing));
    } else {
      state.set_delay(own.sequence,
                      late.empty() && !ahead.empty() ? ahead : state.about(CauseKind::peer_late, late));
    }
  }

  static std::deque<int> suspects_of(const std::string& ranks, int size) {
    const auto numbers = numbers_in(ranks);
    std::deque<int> all(numbers.begin(), numbers.end());
    for (int rank = 0; numbers.empty() && rank < size; ++rank) all.push_back(rank);
    return all;
  }

  void look(GroupState& state, const Alert& alert) {
    // With a suspicion, leave the store alone: it may be gone, too, and torch would log that at length.
    if (suspicion.empty() && !has_ended && !store_is_lost && Clock::now() - looked >= intervals.look) {
      looked = Clock::now();
      ask([&] {
        read_heartbeat(alert.needs_all);
        if (const auto record = read_key(store(), kFailureKey); record.size() > sizeof(cl_cause)) {
          reported = true;  // by another rank
          cl_cause cause;
          std::memcpy(&cause, record.data(), sizeof(cause));
          state.fail(record.substr(sizeof(cause)), Cause(cause), c10d::ErrorType::REMOTE_ERROR);
        }
        if (alert.wait) find_late(state, *alert.wait);
      });
    }
    if (store_is_lost && alert.needs_all) {
      suspect(Cause(CauseKind::store_gone));
    }
    if (!suspicion.empty() && Clock::now() - suspected > kGracePeriod) state.fail(suspicion);
  }

  void report(const GroupState& state) {
    if (reported) return;
    reported = true;
    try {
      auto cause = state.cause();
      if (cause.finder < 0) cause.finder = state.members.number_of(state.rank);
      const std::string record(reinterpret_cast<const char*>(static_cast<cl_cause*>(&cause)), sizeof(cl_cause));
      const auto text = c10::str(state.members.name(state.rank), " failed: ", state.reason());
      store().set(kFailureKey, as_bytes(record + text));
    } catch (const std::exception&) {
      // The store is gone, so no rank could read the report.
    }
  }
};

Watchdog& Watchdog::instance() {
  static auto* watchdog = new Watchdog;
  return *watchdog;
}

void Watchdog::add(const std::shared_ptr<GroupState>& group, c10::intrusive_ptr<c10d::Store> store,
                   const std::vector<Peer>& local_peers, Heartbeat heartbeat, StoreIntervals intervals) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto watched = std::make_shared<Watched>(std::move(store), intervals);
  watched->group = group;
  watched->heartbeat = std::move(heartbeat);
  for (const auto& peer : local_peers) watched->local_peers.push_back({peer.rank, Process(peer.pid)});
  const bool writes = !watched->heartbeat.own_key.empty();
  groups_[group.get()] = std::move(watched);
  if (writes) wake();
}

void Watchdog::remove(const GroupState* group) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  auto state = found->second->group.lock();
  if (state && state->failed() && !found->second->reported) {
    found->second->removed = std::move(state);
    wake();
  } else {
    groups_.erase(found);
  }
}

void Watchdog::linger() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto failed = failed_;
  lock.unlock();
  while (failed && Clock::now() - *failed < kLingerTime) std::this_thread::sleep_for(kInterval / 10);
}

void Watchdog::alert(const std::shared_ptr<GroupState>& group, const Cause& suspicion,
                     std::optional<std::set<int>> needed) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(group.get());
  if (found == groups_.end()) return;
  auto& watched = *found->second;
  const auto now = Clock::now();
  watched.alerted = now;
  if (needed) {
    watched.need.peers.merge(*needed);
  } else {
    watched.need.all = watched.alert.needs_all = true;
  }
  watched.look_after_peers(*group, now);
  if (group->failed() && !failed_) failed_ = now;
  if (watched.callers_suspicion.empty()) {
    watched.callers_suspicion = suspicion;
    watched.callers_suspected = now;
  } else if (now - watched.callers_suspected > kGracePeriod) {
    group->fail(watched.callers_suspicion);
  }
  if (watched.server.is_silent_for(watched.intervals.timeout)) {
    Cause cause(CauseKind::store_silent);
    cause.milliseconds = watched.intervals.timeout.count();
    group->fail(cause);
  }
  wake();
}

void Watchdog::publish_wait(const GroupState* group, uint64_t sequence, std::string ranks, CallSummary call,
                            bool asks) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  auto& wait = found->second->alert.wait;
  if (!wait || sequence <= wait->sequence) wait = Wait{sequence, std::move(ranks), std::move(call), asks};
}

// The caller holds the lock.
void Watchdog::wake() {
  if (!running_) {
    running_ = true;
    std::thread([this] { run(); }).detach();
  }
  wake_.notify_one();
}

Cause Watchdog::ended_peer(const GroupState* group) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(group);
  return found == groups_.end() ? Cause() : found->second->ended_peer({{}, true}, *group);
}

void Watchdog::run() {
  pthread_setname_np(pthread_self(), "cpulaunch-watch");
  for (;;) {
    std::vector<std::pair<std::shared_ptr<Watched>, Alert>> alerted;
    std::vector<std::shared_ptr<Watched>> writing;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      for (const auto& entry : groups_) {
        if (Clock::now() - entry.second->alerted < kAlertTime || entry.second->removed) {
          alerted.emplace_back(entry.second, std::exchange(entry.second->alert, {}));
        }
        if (!entry.second->heartbeat.own_key.empty()) writing.push_back(entry.second);
      }
      if (alerted.empty() && writing.empty()) {
        wake_.wait(lock);
        continue;
      }
    }
    // Don't hold the lock here: a store may block for long if its host is gone.
    for (const auto& watched : writing) {
      watched->write_heartbeat(pulses_[watched->heartbeat.own_key]);
    }
    for (const auto& [watched, alert] : alerted) {
      const auto state = watched->group.lock();
      if (!state) continue;
      if (!state->failed()) watched->look(*state, alert);
      if (state->failed()) watched->report(*state);
      if (!watched->removed) continue;
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = groups_.find(state.get());
      if (found != groups_.end() && found->second == watched) groups_.erase(found);
    }
    std::this_thread::sleep_for(kInterval);
  }
}

}  // namespace cpulaunch
