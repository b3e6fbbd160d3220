// Messages between the ranks of different hosts.
//
// A receiver names the message that it expects by its tag.  The messages from one rank to another may hold each other
// up: one that nobody has asked for yet may keep those behind it waiting.  So whoever sends must be sure that each
// message is asked for without the help of a later one to the same rank; hierarchy.hpp says why that is so here.
//
// Only meet() and leave() block.  Nothing is thread-safe: the caller has a lock, and calls progress() until it has what
// it waits for.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cause.hpp"
#include "signature.hpp"

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
  Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;
  virtual ~Network() = default;

  // These add 1 to `pending` and take it off again when the memory is free to be used: the data is on its way, or is
  // here.  The memory and the counter must stay until then, or until close().
  // Where `more_follow` to the same rank, the message may go with them when progress() is called.
  virtual void send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes, int& pending,
                    bool more_follow = false) = 0;
  virtual void receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes,
                       int& pending) = 0;

  // Messages of this operation come next, and those of later ones after that.
  virtual void enter(const Signature& signature) = 0;
  // Sends and receives what it can.  Returns how many bytes that was, or 1 if something else has changed; 0: nothing
  // can be done now.  Throws std::runtime_error where a rank sends something else than is expected of it.
  virtual size_t progress() = 0;
  // Throws Mismatch where a rank from which nothing is expected has sent a message of an operation that this rank has
  // called otherwise: where two ranks each take themselves for the root, both send, and neither receives.  Once a
  // connection is lost, also where something is expected: who has left may have sent what tells why.
  virtual void check_unasked() = 0;
  // Whether such a message may still be on its way: this rank has just called an operation that has a root.
  virtual bool may_get_unasked() const = 0;

  // What has become of a connection that is still needed; empty when all is well.  Looks after the ranks from which
  // nothing has come yet, and asks those that are waited for whether they call the same: two that each take
  // themselves for the root of a gather send nothing otherwise.
  virtual const Cause& lost() = 0;
  // The ranks from which something is expected next; where there are none, those that have not taken what is sent to
  // them.
  virtual std::vector<int> awaited() const = 0;
  // Returns when small messages reach all ranks that a collective may send to, also those that are busy.  Throws
  // std::runtime_error where one has left.
  virtual void meet() {}
  // Returns when the others have got what has been sent to them; this rank expects nothing, and sends nothing more.
  virtual void leave() {}
  // The peers notice.  Nothing moves any more.
  virtual void close() = 0;
};

}  // namespace cpulaunch
