// Messages between the ranks of different hosts.
//
// A receiver identifies the message that it expects by its tag.  Messages from one rank to another may hold each other
// up: a message that the receiver has not asked for yet may delay those behind it.  So a sender must make sure that the
// receiver asks for each message without needing a later one of the same sender.  hierarchy.hpp shows that this holds.
//
// Only meet() blocks.  Nothing is thread-safe: the caller holds a lock, and calls progress() until it has what it waits
// for.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cause.hpp"
#include "signature.hpp"

namespace cpulaunch {

// Identifies a message between two ranks.
struct Tag {
  uint64_t operation;  // the operation's number in the group
  uint32_t piece = 0;  // the piece of the operation
  uint16_t phase = 0;  // the phase of the piece
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

  // These add 1 to `pending`, and subtract it again when the caller may use the memory: when the data is sent, or has
  // been received.  The memory and the counter must stay valid until then, or until close().  If `more_follow` to the
  // same rank, the message may wait for progress(), to go together with them.
  virtual void send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes, int& pending,
                    bool more_follow = false) = 0;
  virtual void receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes,
                       int& pending) = 0;

  // Announces that this rank's next messages belong to this operation.  Those of later operations come after them.
  virtual void enter(const Signature& signature) = 0;
  // Sends and receives what is possible now.  Returns the number of bytes, or 1 if something else has changed, or 0 if
  // nothing could be done.  Throws std::runtime_error if a rank sends something else than is expected of it.
  virtual size_t progress() = 0;
  // Throws Mismatch if a rank from which nothing is expected has sent a message of an operation that this rank has
  // called differently.  For example, two ranks that both consider themselves the root both send, and neither receives.
  // Once a connection is lost, this also checks ranks from which something is expected: a rank that has left may have
  // sent a message that shows why.
  virtual void check_unasked() = 0;
  // Whether one of these messages may still arrive: this rank has just called an operation that has a root.
  virtual bool may_get_unasked() const = 0;

  // Returns why a connection that is still needed is lost; empty while all is well.  Also checks the ranks that have
  // not sent anything yet, and asks the ranks that this rank waits for whether they call the same operation.
  // Otherwise, two ranks that both consider themselves the root of a gather would send nothing.
  virtual const Cause& lost() = 0;
  // The ranks from which a message is expected next.  If there are none, the ranks that have not received what this
  // rank sends.
  virtual std::vector<int> awaited() const = 0;
  // Returns when small messages can reach all ranks to which a collective may send, even busy ranks.  Throws
  // std::runtime_error if one of them has left.
  virtual void meet() {}
  // Returns whether the others have received what was sent to them; call it until they have.  This rank must expect
  // nothing, and send nothing more.
  virtual bool leave() { return true; }
  // Stops all messages.  The peers notice that.
  virtual void close() = 0;
};

}  // namespace cpulaunch
