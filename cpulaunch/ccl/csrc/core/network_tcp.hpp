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
#include "network_messages.hpp"
#include "readiness.hpp"

namespace cpulaunch {

class TcpNetwork final : public MessageNetwork {
 public:
  TcpNetwork(const Layout& layout, std::shared_ptr<Connector> connector)
      : MessageNetwork(layout, std::move(connector)), outgoing_(layout.size), streams_(layout.size) {}

  // Where `more_follow`, the kernel fills its packets instead of ending one with each message.
  void send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes, int& pending,
            bool more_follow = false) override;
  size_t progress() override;
  void close() override;

 private:
  struct Outgoing {
    Sender sender;
    size_t done = 0;  // bytes of the first message, with its header
    Fifo<Sent> queue;
    bool listed = false;      // in sending_
  };
  struct Stream {  // from a rank
    static constexpr size_t kRoom = 8192;  // so that a small message takes one call of the kernel

    Receiver receiver;
    std::vector<char> buffer;   // kRoom bytes, of which those from `begin` to `end` have not been used yet
    size_t begin = 0, end = 0;
    size_t done = 0;            // bytes of the message that is being received
  };

  bool take_header(int from) override;
  bool look(int from) override;
  std::string why_lost(int from) override;
  void send_question(int to, const Sent& question) override;
  std::vector<int> sending() const override { return sending_; }

  void enqueue(int to, const Sent& message, bool more_follow);
  size_t write_to(int to);
  size_t write_some(Outgoing& peer);
  size_t read_from(int from, bool looks);
  size_t read_expected(int from);
  bool open_receiver(int from, bool looks = true);
  size_t read_from_ready();
  size_t fill(int from);

  std::vector<Outgoing> outgoing_;  // to each rank
  std::vector<Stream> streams_;     // and from it
  std::vector<int> sending_;        // ranks with messages to send
  Readiness readiness_;
};

}  // namespace cpulaunch
