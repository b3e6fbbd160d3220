// Messages between the ranks of different hosts, over TCP.
//
// The messages of a connection arrive in the order in which they are sent.  A message goes from the sender's memory to
// the receiver's without a copy but the kernel's.  A message that nobody has asked for yet stays in the kernel's
// buffers, and what comes behind it waits too.  So whoever sends must be sure
// that each message is asked for without the help of a later one on the same connection; hierarchy.hpp
// says why that is so here.
//
// Nothing here blocks and nothing is thread-safe: the caller has a lock, and calls progress() until it has what it
// waits for.

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cause.hpp"
#include "connector.hpp"
#include "layout.hpp"
#include "readiness.hpp"
#include "shared_slots.hpp"

namespace cpulaunch {

// Tells the messages of two ranks apart.
struct Tag {
  uint64_t operation;  // its number in this group
  uint32_t piece = 0;  // of the operation
  uint16_t phase = 0;  // of the piece
  uint16_t lane = 0;

  bool operator==(const Tag& other) const {
    return operation == other.operation && piece == other.piece && phase == other.phase && lane == other.lane;
  }
};

class Network {
 public:
  Network(const Layout& layout, std::shared_ptr<Connector> connector)
      : members_(layout.members), connector_(std::move(connector)), outgoing_(layout.size), incoming_(layout.size) {}
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // These add 1 to `pending` and take it off again when the memory is free to be used: the data is on its way, or is
  // here.  The memory and the counter must stay until then, or until close().
  // Where `more_follow` to the same rank, a large message goes with them when progress() is called: the kernel fills
  // its packets then, instead of ending one with each message.
  void send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes, int& pending,
            bool more_follow = false);
  void receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes, int& pending);

  // Messages of this operation come next, and those of later ones after that.
  void enter(const Signature& signature);
  // Sends and receives what it can.  Returns how many bytes that was, or 1 if something else has changed; 0: nothing
  // can be done now.  Throws std::runtime_error where a rank sends something else than is expected of it.
  size_t progress();
  // Throws Mismatch where a rank from which nothing is expected has sent a message of an operation that this rank has
  // called otherwise: where two ranks each take themselves for the root, both send, and neither receives.  Once a
  // connection is lost, also where something is expected: who has left may have sent what tells why.
  void check_unasked();
  // Whether such a message may still be on its way: this rank has just called an operation that has a root.
  bool may_get_unasked() const { return current_ && current_->root >= 0 && Clock::now() - entered_ < kLongestWay; }

  // What has become of a connection that is still needed; empty when all is well.  Looks after the ranks that have not
  // opened theirs, and asks those that are waited for whether they call the same: two that each take themselves for
  // the root of a gather send nothing otherwise.
  const Cause& lost();
  // The ranks from which something is expected next; where there are none, those that have not taken what is sent to
  // them.
  std::vector<int> awaited() const;
  // The peers notice.  Nothing moves any more.
  void close();

 private:
  // Of a message to another host that needn't wait for others: also where that host's processors are busy.
  static constexpr std::chrono::milliseconds kLongestWay{50};

  struct Header {
    Tag tag;
    Signature signature;
    uint64_t bytes;
  };
  struct Sent {
    Header header;
    const char* data;
    int* pending;
  };
  struct Outgoing {
    Sender sender;
    size_t done = 0;  // bytes of the first message, with its header
    std::deque<Sent> queue;
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
