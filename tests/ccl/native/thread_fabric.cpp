#include "thread_fabric.hpp"

#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

namespace cpulaunch {

namespace {

constexpr int kAll = -1;  // the channel of exchange_all(); the others are lanes

}  // namespace

void Mailboxes::put(int from, int to, int channel, Message message) {
  auto& its = box(from, to);
  std::lock_guard<std::mutex> lock(its.mutex);
  its.messages[channel].push_back(std::move(message));
}

bool Mailboxes::take(int from, int to, int channel, Message& message) {
  auto& its = box(from, to);
  std::lock_guard<std::mutex> lock(its.mutex);
  auto& messages = its.messages[channel];
  if (messages.empty()) return false;
  message = std::move(messages.front());
  messages.pop_front();
  return true;
}

class ThreadFabric::Moving final : public Transfer {
 public:
  struct Peer {
    int rank;
    char* data;
    size_t bytes;
  };

  Moving(ThreadFabric& fabric, int channel) : channel(channel), fabric_(fabric) {
    at_ = fabric.moving_.insert(fabric.moving_.end(), this);
  }
  ~Moving() override { fabric_.moving_.erase(at_); }

  bool test() override {
    fabric_.move();
    return done;
  }
  void abort() override {}
  std::string stragglers() override { return ""; }

  const int channel;
  std::vector<Peer> to, from;
  std::vector<char> memory;                  // for what comes, where it goes nowhere else at first
  std::function<void()> finish = [] {};  // once all has come
  bool sent = false, done = false;

 private:
  ThreadFabric& fabric_;
  std::list<Moving*>::iterator at_;
};

std::unique_ptr<ThreadFabric::Moving> ThreadFabric::begin(int channel) {
  return std::make_unique<Moving>(*this, channel);
}

// A channel's messages are told apart by their order.
void ThreadFabric::move() {
  std::map<int, bool> waits_to_send, waits_to_receive;  // by their channels
  for (auto* each : moving_) {
    if (!each->sent && !waits_to_send[each->channel] && random_() % 4) {
      for (const auto& peer : each->to) {
        mailboxes_->put(layout_.rank, peer.rank, each->channel, {peer.data, peer.data + peer.bytes});
      }
      each->sent = true;
    }
    waits_to_send[each->channel] |= !each->sent;
    if (waits_to_receive[each->channel]) continue;
    Mailboxes::Message message;
    while (!each->from.empty() && mailboxes_->take(each->from.back().rank, layout_.rank, each->channel, message)) {
      const auto& peer = each->from.back();
      if (message.size() != peer.bytes) throw std::runtime_error("a message of another size has come");
      if (!message.empty()) std::memcpy(peer.data, message.data(), message.size());
      each->from.pop_back();
    }
    waits_to_receive[each->channel] = !each->from.empty();
    if (each->done || !each->sent || !each->from.empty()) continue;
    each->finish();
    each->done = true;
  }
}

ThreadFabric::Result ThreadFabric::reduce(int lane, char* data, size_t bytes, NumberType type, Reduction reduction) {
  auto moving = begin(lane);
  moving->memory.resize(layout_.hosts * bytes);
  std::vector<const char*> all;
  for (int host = 0; host < layout_.hosts; ++host) {
    char* memory = moving->memory.data() + host * bytes;
    all.push_back(host == layout_.host ? data : memory);
    if (host == layout_.host) continue;
    moving->to.push_back({layout_.rank_with(lane, host), data, bytes});
    moving->from.push_back({layout_.rank_with(lane, host), memory, bytes});
  }
  moving->finish = [=] { reduce_for(type, reduction)(data, all.data(), all.size(), bytes, 1); };
  return moving;
}

ThreadFabric::Result ThreadFabric::broadcast(int lane, char* data, size_t bytes, int root) {
  auto moving = begin(lane);
  for (int host = 0; host < layout_.hosts && root == layout_.host; ++host) {
    if (host != root) moving->to.push_back({layout_.rank_with(lane, host), data, bytes});
  }
  if (root != layout_.host) moving->from.push_back({layout_.rank_with(lane, root), data, bytes});
  return moving;
}

ThreadFabric::Result ThreadFabric::gather(int lane, const char* from, char* to, const Sizes& sizes) {
  auto moving = begin(lane);
  for (int host = 0; host < layout_.hosts; ++host) {
    if (host == layout_.host) {
      moving->finish = [=, bytes = sizes[host]] {
        if (bytes) std::memcpy(to, from, bytes);
      };
    } else {
      moving->to.push_back({layout_.rank_with(lane, host), const_cast<char*>(from), sizes[layout_.host]});
      moving->from.push_back({layout_.rank_with(lane, host), to, sizes[host]});
    }
    to += sizes[host];
  }
  return moving;
}

ThreadFabric::Result ThreadFabric::exchange(int lane, const char* from, const Sizes& sent, char* to,
                                            const Sizes& received) {
  auto moving = begin(lane);
  for (int host = 0; host < layout_.hosts; ++host) {
    if (host != layout_.host) {
      moving->to.push_back({layout_.rank_with(lane, host), const_cast<char*>(from), sent[host]});
      moving->from.push_back({layout_.rank_with(lane, host), to, received[host]});
    }
    from += sent[host];
    to += received[host];
  }
  return moving;
}

ThreadFabric::Result ThreadFabric::exchange_all(const std::vector<Part>& sent, const std::vector<Part>& received) {
  auto moving = begin(kAll);
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank == layout_.rank) continue;
    moving->to.push_back({rank, sent[rank].data, sent[rank].bytes});
    moving->from.push_back({rank, received[rank].data, received[rank].bytes});
  }
  return moving;
}

}  // namespace cpulaunch
