// The network over TCP.
//
// The messages of a connection arrive in the order in which they are sent.  A message goes from the sender's memory to
// the receiver's without a copy but the kernel's.  A message that nobody has asked for yet stays in the kernel's
// buffers, and what comes behind it waits too.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cause.hpp"
#include "connector.hpp"
#include "fifo.hpp"
#include "layout.hpp"
#include "network.hpp"
#include "readiness.hpp"

namespace cpulaunch {

class TcpNetwork final : public Network {
 public:
  TcpNetwork(const Layout& layout, std::shared_ptr<Connector> connector)
      : members_(layout.members), connector_(std::move(connector)), outgoing_(layout.size), incoming_(layout.size) {}

  // Where `more_follow`, the kernel fills its packets instead of ending one with each message.
  void send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes, int& pending,
            bool more_follow = false) override;
  void receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes, int& pending) override;
  void enter(const Signature& signature) override;
  size_t progress() override;
  void check_unasked() override;
  bool may_get_unasked() const override {
    return current_ && current_->root >= 0 && Clock::now() - entered_ < kLongestWay;
  }
  const Cause& lost() override;
  std::vector<int> awaited() const override;
  void close() override;

 private:
  // Of a message to another host that needn't wait for others: also where that host's processors are busy.
  static constexpr std::chrono::milliseconds kLongestWay{50};

  struct Header {
    Tag tag;
    Signature signature;
    uint64_t bytes;
  };
  struct Sent {
    Header header{};
    const char* data = nullptr;
    int* pending = nullptr;
  };
  struct Outgoing {
    Sender sender;
    size_t done = 0;  // bytes of the first message, with its header
    Fifo<Sent> queue;
    bool listed = false;      // in sending_
  };
  struct Expected {
    Tag tag;
    Signature signature;
    char* data;
    size_t bytes;
    int* pending;
  };
  struct Incoming {
    static constexpr size_t kRoom = 8192;  // so that a small message takes one call of the kernel

    Receiver receiver;
    Silent silent;               // while `receiver` isn't open
    std::optional<uint64_t> asked;  // about the operation with this number
    std::vector<char> buffer;    // kRoom bytes, of which those from `begin` to `end` have not been used yet
    size_t begin = 0, end = 0;
    bool in_message = false;     // `header` is of a message whose expected data has partly come
    bool in_header = false;      // `header` is of a message that nobody has asked for yet
    Header header{};
    size_t done = 0;             // bytes of the message
    std::vector<Expected> expected;  // with the one that is being received in front
  };
  void enqueue(int to, const Sent& message, bool more_follow);
  size_t write_to(int to);
  size_t write_some(Outgoing& peer);
  size_t read_from(int from, bool looks);
  size_t read_expected(int from);
  bool open_receiver(int from, bool looks = true);
  size_t read_from_ready();
  bool read_header(int from);
  bool begin_message(int from);
  size_t fill(int from);
  void ask(int rank);
  bool answer(int from);
  void lose(int peer, const std::string& what);

  const Members members_;
  const std::shared_ptr<Connector> connector_;
  std::vector<Outgoing> outgoing_;  // of each rank, as incoming_
  std::vector<Incoming> incoming_;
  std::vector<int> sending_, receiving_;  // ranks with messages to send, and those from which some are expected
  Readiness readiness_;
  std::optional<Signature> current_;
  Clock::time_point entered_;  // when that was called, if it has a root
  unsigned idle_calls_ = 0;  // of progress(), since something has moved
  int questions_ = 0;        // under way
  Cause lost_;
};

}  // namespace cpulaunch
