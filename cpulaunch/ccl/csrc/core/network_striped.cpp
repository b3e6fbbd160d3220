#include "network_striped.hpp"

#include <algorithm>
#include <numeric>

#include "operations.hpp"
#include "team.hpp"

namespace cpulaunch {

namespace {

// The least size of a stripe.  Smaller ones would take more system calls than the message as a whole.
constexpr size_t kLeastStripe = 1 << 20;
// The least number of bytes for each thread.  For fewer, waking the thread would take longer than its system call.
constexpr size_t kLeastForThread = 64 << 10;
// After this many calls of progress() that have moved nothing, some 2 ms, the caller continues alone, so that the other
// threads of the team can sleep.
constexpr unsigned kMostIdleCalls = 1000;

}  // namespace

StripedNetwork::StripedNetwork(const Layout& layout, const std::shared_ptr<Connector>& connector, size_t networks)
    : hosts_(layout.host_numbers), moved_(networks) {
  for (size_t number = 0; number < networks; ++number) {
    networks_.push_back(std::make_unique<TcpNetwork>(layout, connector, number, networks));
  }
}

template <class Act>
void StripedNetwork::for_each_stripe(int rank, const Tag& tag, size_t bytes, const Act& act) {
  const size_t stripes = networks_.size();
  if (bytes < stripes * kLeastStripe) {
    act(network_of(rank, tag.piece % stripes), Range{0, bytes});
    return;
  }
  for (size_t i = 0; i < stripes; ++i) act(network_of(rank, i), part_of({0, bytes}, i, stripes, kCopyGranule));
}

// Data that is worth a thread waits for progress(), in which the network's own thread writes it.
void StripedNetwork::send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes,
                          int& pending, bool more_follow) {
  for_each_stripe(to, tag, bytes, [&](TcpNetwork& network, Range stripe) {
    const bool waits = more_follow || bytes >= kLeastForThread;
    network.send_stripe(to, {tag, signature, bytes}, data, stripe, pending, waits);
  });
}

void StripedNetwork::receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes,
                             int& pending) {
  for_each_stripe(from, tag, bytes, [&](TcpNetwork& network, Range stripe) {
    network.receive_stripe(from, {tag, signature, bytes}, data, stripe, pending);
  });
}

void StripedNetwork::enter(const Signature& signature) {
  for (auto& each : networks_) each->enter(signature);
  idle_calls_ = 0;
}

// A team whose threads poll is used while enough bytes are under way.  Other threads take longer to start, so they are
// used only if the last call has moved enough bytes.
size_t StripedNetwork::threads_for_progress() const {
  const auto* team = lent_team();
  if (!team) return 1;
  const size_t networks = networks_.size(), least = networks * kLeastForThread;
  size_t under_way = 0;
  for (const auto& each : networks_) under_way += each->under_way();
  const size_t moved = std::accumulate(moved_.begin(), moved_.end(), size_t{0});
  const bool pays = team->polls ? idle_calls_ < kMostIdleCalls : moved >= least;
  return under_way >= least && pays ? std::min<size_t>(team->size, networks) : 1;
}

size_t StripedNetwork::progress() {
  const size_t threads = threads_for_progress();
  const auto failure = run_on_team(threads, [&](size_t thread) {
    for (size_t i = thread; i < networks_.size(); i += threads) moved_[i] = networks_[i]->progress();
  });
  if (failure) std::rethrow_exception(failure);
  const size_t moved = std::accumulate(moved_.begin(), moved_.end(), size_t{0});
  idle_calls_ = moved ? 0 : idle_calls_ + 1;
  return moved;
}

void StripedNetwork::check_unasked() {
  for (auto& each : networks_) each->check_unasked();
}

const Cause& StripedNetwork::lost() {
  const Cause* cause = nullptr;
  for (auto& each : networks_) {
    cause = &each->lost();
    if (!cause->empty()) break;
  }
  return *cause;
}

std::vector<int> StripedNetwork::awaited() const {
  std::vector<const MessageNetwork*> all;
  for (const auto& each : networks_) all.push_back(each.get());
  return MessageNetwork::awaited_by(all);
}

bool StripedNetwork::leave() {
  bool all = true;
  for (auto& each : networks_) all = each->leave() && all;
  return all;
}

void StripedNetwork::close() {
  for (auto& each : networks_) each->close();
}

std::unique_ptr<Network> make_tcp_network(const Layout& layout, const std::shared_ptr<Connector>& connector,
                                          size_t connections) {
  if (connections > 1) return std::make_unique<StripedNetwork>(layout, connector, connections);
  return std::make_unique<TcpNetwork>(layout, connector);
}

}  // namespace cpulaunch
