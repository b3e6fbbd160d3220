#include "counts.hpp"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep.hpp"
#include "meeting.hpp"
#include "transport_own.hpp"

namespace cpulaunch {

namespace {

bool moves(Kind kind) { return kind != Kind::all_reduce && kind != Kind::barrier; }

// A rank's collective, or its messages, and their memory.
class Ready {
 public:
  Ready(const Workload& workload, int ranks, int rank)
      : memory_(std::max(workload.bytes, sizeof(float))), others_(moves(workload.kind) ? memory_.size() : 0) {
    if (workload.in_shared_memory) shared_.reset(SharedBlocks::copy(memory_.data(), memory_.size()));
    Collective its{};
    its.kind = workload.kind;
    its.type = NumberType::float32;
    if (workload.has_root()) its.root = 0;
    char* const other = others_.data();
    const auto parts = [&](char* data) {
      Parts all(ranks);
      const size_t bytes = workload.bytes / ranks;
      for (auto& each : all) each = {data, bytes}, data += bytes;
      return all;
    };
    const Parts one{{other, workload.bytes / ranks}}, whole{{shared_ ? shared_.get() : memory_.data(), workload.bytes}};
    switch (workload.kind) {
      case Kind::all_gather: its.sent = one, its.received = parts(memory_.data()); break;
      case Kind::reduce_scatter: its.sent = parts(memory_.data()), its.received = one; break;
      case Kind::all_to_all: its.sent = parts(memory_.data()), its.received = parts(other); break;
      case Kind::gather: its.sent = one, its.received = rank == 0 ? parts(memory_.data()) : Parts(); break;
      case Kind::scatter: its.sent = rank == 0 ? parts(memory_.data()) : Parts(), its.received = one; break;
      case Kind::send: make_messages(rank ^ 1, ranks, whole[0], {other, workload.bytes}); return;
      default: its.received = whole;
    }
    all_.push_back(its);
  }

  std::unique_ptr<Transfer> start(Transport& transport) const {
    auto transfer = std::make_unique<CombinedTransfer>();
    for (const auto& each : all_) transfer->add(transport.start(each));
    return transfer;
  }

 private:
  void make_messages(int peer, int ranks, const Part& sent, const Part& received) {
    if (peer >= ranks) return;
    all_.resize(2);
    all_[0].kind = Kind::send;
    all_[0].root = all_[1].root = peer;
    all_[0].sent = {sent};
    all_[1].kind = Kind::receive;
    all_[1].received = {received};
  }

  std::vector<char> memory_, others_;
  std::unique_ptr<char, void (*)(char*)> shared_{nullptr, SharedBlocks::free};
  std::vector<Collective> all_;
};

void raise_to(Counts& most, const Counts& other) {
  for (const auto member : {&Counts::sends, &Counts::sent_bytes, &Counts::receives, &Counts::received_bytes,
                            &Counts::vain, &Counts::polls, &Counts::allocations, &Counts::large_allocations}) {
    most.*member = std::max(most.*member, other.*member);
  }
}

// What one call takes in every run, with one rank on each host: the values of the busiest rank.
struct Steps {
  uint64_t rounds = 0, messages = 0, bytes = 0;
  size_t peers = 0;
};

// Tests the transfer until the rank needs something from another one.  Returns true when the transfer is done.
bool settle(Transfer& transfer) {
  for (auto before = transfer.steps();; before = transfer.steps()) {
    if (transfer.test()) return true;
    if (transfer.steps() == before) return false;
  }
}

Steps steps_of(const Workload& workload, int hosts) {
  Lockstep network(hosts);
  std::vector<int> host_of(hosts);
  std::iota(host_of.begin(), host_of.end(), 0);
  std::deque<Ready> ready;
  std::vector<std::unique_ptr<OwnTransport>> transports;
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (int rank = 0; rank < hosts; ++rank) {
    auto own = std::make_shared<Hierarchy>(Layout(host_of, rank), nullptr, network.network(rank));
    transports.push_back(std::make_unique<OwnTransport>(std::move(own), nullptr));
    transfers.push_back(ready.emplace_back(workload, hosts, rank).start(*transports.back()));
  }
  Steps steps;
  const auto all_settle = [&] {
    bool done = true;
    for (const auto& each : transfers) done = settle(*each) && done;
    return done;
  };
  for (; !all_settle(); ++steps.rounds) {
    if (!network.deliver()) throw std::runtime_error(std::string(workload.name) + " gets stuck");
  }
  for (const auto& each : network.sent) {
    steps.messages = std::max(steps.messages, each.messages);
    steps.bytes = std::max(steps.bytes, each.bytes);
    steps.peers = std::max(steps.peers, each.peers.size());
  }
  return steps;
}

struct Counted {
  Counts counts;           // in all calls, like `moved`
  Moved moved;
  size_t descriptors = 0;  // per rank, on average
};

// Returns the highest counts of any rank.
Counted count(const Workload& workload, const std::vector<int>& host_of) {
  // These calls are under way together.  So each slot has its memory, and later calls need no more, even if they
  // overlap.
  constexpr int kTimesBefore = SharedSlots::kMaxSlots;
  Meeting meeting(host_of);
  std::mutex mutex;
  Counted most;
  const auto before = open_descriptors();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < meeting.size(); ++rank) {
    threads.emplace_back([&, rank] {
      std::shared_ptr<PointToPoint> messages;
      auto hierarchy = meeting.join(rank, &messages);
      OwnTransport transport(std::move(hierarchy), std::move(messages));
      const Ready ready(workload, meeting.size(), rank);
      const auto finish = [](Transfer& transfer) {
        while (!transfer.test()) std::this_thread::yield();
      };
      std::vector<std::unique_ptr<Transfer>> first;
      for (int i = 0; i < kTimesBefore; ++i) first.push_back(ready.start(transport));
      meeting.wait_for_all();
      for (const auto& each : first) finish(*each);
      first.clear();
      transport.check_calls();  // reads from all connections, as a rank does that waits for long
      meeting.wait_for_all();
      const auto earlier = counts_of_this_thread();
      const auto moved_before = moved_by_this_thread();
      for (int i = 0; i < workload.times; ++i) finish(*ready.start(transport));
      const auto since = counts_of_this_thread() - earlier;
      const auto moved = moved_by_this_thread();
      meeting.wait_for_all();
      if (rank == 0) most.descriptors = (open_descriptors() - before) / meeting.size();
      {
        std::lock_guard<std::mutex> lock(mutex);
        raise_to(most.counts, since);
        most.moved.copied = std::max(most.moved.copied, moved.copied - moved_before.copied);
        most.moved.summed = std::max(most.moved.summed, moved.summed - moved_before.summed);
      }
      meeting.wait_for_all();
    });
  }
  for (auto& thread : threads) thread.join();
  return most;
}

}  // namespace

void print_steps(const std::vector<int>& host_of) {
  for (const auto& workload : kWorkloads) {
    if (workload.kind == Kind::send) continue;
    const auto steps = steps_of(workload, static_cast<int>(host_of.size()));
    std::printf("%s: rounds=%lu messages=%lu bytes=%lu peers=%zu\n", workload.name, steps.rounds, steps.messages,
                steps.bytes, steps.peers);
  }
}

void print_counts(const std::vector<int>& host_of) {
  for (const auto& workload : kWorkloads) {
    const auto [counts, moved, descriptors] = count(workload, host_of);
    std::printf("%s: descriptors=%zu", workload.name, descriptors);
    const auto print = [&](const char* key, uint64_t number) {
      std::printf(" %s=%.12g", key, static_cast<double>(number) / workload.times);
    };
    print("copied", moved.copied), print("summed", moved.summed);
    print("sent_bytes", counts.sent_bytes), print("sends", counts.sends);
    print("receives", counts.receives), print("vain_receives", counts.vain), print("polls", counts.polls);
    print("allocations", counts.allocations), print("large_allocations", counts.large_allocations);
    std::printf("\n");
  }
}

}  // namespace cpulaunch
