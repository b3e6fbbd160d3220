// A fabric between ranks that are threads of one process: messages in memory.

#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "fabric.hpp"
#include "layout.hpp"

namespace cpulaunch {

// What is under way from each rank to each other one.  A lock for each pair, so that ranks learn nothing of each
// other's memory but by a message.
class Mailboxes {
 public:
  using Message = std::vector<char>;

  explicit Mailboxes(int ranks) : ranks_(ranks), boxes_(ranks * ranks) {}

  void put(int from, int to, int channel, Message message);
  // False where nothing has come.
  bool take(int from, int to, int channel, Message& message);

 private:
  struct Box {
    std::mutex mutex;
    std::map<int, std::deque<Message>> messages;  // by their channels
  };

  Box& box(int from, int to) { return boxes_[from * ranks_ + to]; }

  const int ranks_;
  std::vector<Box> boxes_;
};

// As a real one may, it reads and writes a transfer's memory at any time until that is done, and moves all transfers
// on in a test() of one.
class ThreadFabric final : public Fabric {
 public:
  ThreadFabric(std::shared_ptr<Mailboxes> mailboxes, const Layout& layout)
      : mailboxes_(std::move(mailboxes)), layout_(layout), random_(layout.rank) {}

  Result reduce(int lane, char* data, size_t bytes, NumberType type, Reduction reduction) override;
  Result broadcast(int lane, char* data, size_t bytes, int host) override;
  Result gather(int lane, const char* from, char* to, const Sizes& sizes) override;
  Result exchange(int lane, const char* from, const Sizes& sent, char* to, const Sizes& received) override;
  Result exchange_all(const std::vector<Part>& sent, const std::vector<Part>& received) override;

 private:
  class Moving;

  void move();
  std::unique_ptr<Moving> begin(int channel);

  const std::shared_ptr<Mailboxes> mailboxes_;
  const Layout layout_;
  std::mt19937 random_;
  std::list<Moving*> moving_;  // in the order in which they were started
};

}  // namespace cpulaunch
