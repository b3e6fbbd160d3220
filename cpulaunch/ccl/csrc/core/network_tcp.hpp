// The network over TCP.
//
// The messages of a connection arrive in the order in which they are sent.  Only the kernel copies them on their way
// from the sender's memory to the receiver's.  A message that no receive() has asked for yet stays in the kernel's
// buffers, and so do the messages behind it.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cause.hpp"
#include "fifo.hpp"
#include "layout.hpp"
#include "link.hpp"
#include "network_messages.hpp"
#include "readiness.hpp"

namespace cpulaunch {

class TcpNetwork final : public MessageNetwork {
 public:
  // One of `networks` networks that carry the group's messages, each over a channel of its own between two ranks.  The
  // first channel of a rank is in the network with the number of its host, modulo `networks`.
  TcpNetwork(const Layout& layout, std::shared_ptr<Connector> connector, size_t number = 0, size_t networks = 1);

  // If `more_follow`, the kernel fills its packets instead of ending one with each message.
  void send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes, int& pending,
            bool more_follow = false) override {
    send_stripe(to, {tag, signature, bytes}, data, {0, bytes}, pending, more_follow);
  }
  void receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes, int& pending) override {
    receive_stripe(from, {tag, signature, bytes}, data, {0, bytes}, pending);
  }
  // These carry only the range `stripe` of the message in `data`.
  void send_stripe(int to, const Header& header, const char* data, Range stripe, int& pending, bool more_follow);
  void receive_stripe(int from, const Header& header, char* data, Range stripe, int& pending);
  // The bytes of the messages and stripes that are not complete.
  size_t under_way() const { return under_way_; }
  size_t progress() override;
  bool leave() override;
  void close() override;

 private:
  struct Outgoing {
    size_t done = 0;  // how much of the first message has been written, with its header
    Fifo<Sent> queue;
    bool listed = false;      // in sending_
  };
  struct Stream {  // from a rank
    static constexpr size_t kRoom = 8192;  // a small message takes one system call

    int descriptor = -1;        // that is being watched for data
    std::vector<char> buffer;   // kRoom bytes; those from `begin` to `end` have been read, but not used yet
    size_t begin = 0, end = 0;
    size_t done = 0;            // how much of the current message has been received
  };

  bool take_header(int from) override;
  bool look(int from) override;
  std::string why_lost(int from) override;
  void send_question(int to, const Sent& question) override;
  std::vector<int> sending() const override { return sending_; }

  void enqueue(int to, const Sent& message, bool more_follow);
  size_t write_to(int to);
  size_t write_some(int to);
  size_t read_from(int from);
  size_t read_expected(int from);
  void look_once();
  void watch(int from);
  size_t read_from_ready();
  size_t fill(int from);
  void complete(size_t bytes, int* pending);

  std::vector<Channel> channels_;   // of each rank's link
  std::vector<Link> links_;         // to each rank and back
  std::vector<Outgoing> outgoing_;  // to each rank
  std::vector<Stream> streams_;     // from each rank
  std::vector<int> sending_;        // ranks with messages to send
  size_t under_way_ = 0;
  Readiness readiness_;
  bool looks_ = true;  // for new connections: once in each call of progress()
  Delivery delivery_;
};

}  // namespace cpulaunch
