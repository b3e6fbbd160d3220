#include "lockstep.hpp"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace cpulaunch {

class Lockstep::OfRank final : public Network {
 public:
  OfRank(Lockstep& all, int rank) : all_(all), rank_(rank) {}

  void send(int to, const Tag& tag, const Signature&, const char* data, size_t bytes, int&, bool) override {
    all_.under_way_.push_back({rank_, to, tag, {data, data + bytes}});
    auto& own = all_.sent[rank_];
    ++own.messages;
    own.bytes += bytes;
    own.peers.insert(to);
  }

  void receive(int from, const Tag& tag, const Signature&, char* data, size_t bytes, int& pending) override {
    ++pending;
    expected_.push_back({from, tag, data, bytes, &pending});
    all_.sent[rank_].peers.insert(from);
  }

  size_t progress() override {
    size_t moved = 0;
    auto& inbox = all_.inboxes_[rank_];
    for (auto message = inbox.begin(); message != inbox.end();) {
      const auto one = find(*message);
      if (one == expected_.end()) {
        ++message;
        continue;
      }
      if (one->bytes != message->data.size()) throw std::runtime_error("a message of another size");
      std::memcpy(one->data, message->data.data(), one->bytes);
      --*one->pending;
      moved += one->bytes + 1;
      expected_.erase(one);
      message = inbox.erase(message);
    }
    return moved;
  }

  void enter(const Signature&) override {}
  void check_unasked() override {}
  bool may_get_unasked() const override { return false; }
  const Cause& lost() override { return none_; }
  std::vector<int> awaited() const override { return {}; }
  void close() override {}

 private:
  struct Expected {
    int from;
    Tag tag;
    char* data;
    size_t bytes;
    int* pending;
  };

  std::list<Expected>::iterator find(const Message& message) {
    auto one = expected_.begin();
    while (one != expected_.end() && (one->from != message.from || !(one->tag == message.tag))) ++one;
    return one;
  }

  Lockstep& all_;
  const int rank_;
  const Cause none_;
  std::list<Expected> expected_;
};

std::unique_ptr<Network> Lockstep::network(int rank) { return std::make_unique<OfRank>(*this, rank); }

bool Lockstep::deliver() {
  const bool any = !under_way_.empty();
  for (auto& message : std::exchange(under_way_, {})) inboxes_[message.to].push_back(std::move(message));
  return any;
}

}  // namespace cpulaunch
