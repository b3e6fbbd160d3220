// cpulaunch's own transport: collectives through memory that the ranks of a host share, and over a network between
// hosts.
//
// An operation is cut into pieces, which go through stages one after the other.  Several pieces are under way at the
// same time, so that the network works while memory does.  Each rank goes through the stages at its own pace:
//
//     enter        put              take                  start, exchange                       collect
//   receives ─► own slot ─► from the slots of all ─► between the hosts, and back into ─► from own slot to tensor
//   are posted              local ranks to tensor    the slots that it was taken from
//
//   needs: the   the slot    put[q] > n of all        what comes from other hosts          taken[q] > n of all
//   window       is free     local ranks q                                                 local ranks q
//   then:                    put[r] = n + 1           taken[r] = n + 1
//
// Pieces start in their order, which all hosts have in common, and may be exchanged in any.
//
// Which of these an operation needs, and what happens in them, is the operation's (hierarchical_*.cpp).  For a sum:
//   put       the parts of the piece that other local ranks sum go to this rank's slot
//   take      this rank sums its part over all local ranks
//   start     this rank begins to sum its part over all hosts
//   exchange  it goes on with that, and writes the sum to the other local ranks' slots
//   collect   the parts that the others have summed go from this rank's slot to its tensor
//
//
// Why no rank reads or writes a slot that is being overwritten.  With s slots, rank r overwrites slot n % s when it
// puts piece n + s.  Before that
//   1. it has collected piece n itself, so that it reads nothing from there any more (threads of one rank take turns
//      under mutex_), and
//   2. it has seen taken[q] > n of every other local rank q.  Rank q reads rank r's slot and its signature, and writes
//      to it, only while it takes and exchanges piece n.  It raises taken[q] after that.
// Nobody else touches the slot: for the pieces between, the ranks use the other slots, and they turn to piece n + s in
// this one only after rank r has raised put[r] to n + s + 1, which it does after it has written the slot.
//
// Why the ranks of a host cannot block each other.  Take the first piece n that some rank has not collected.  All ranks
// have collected, and so taken, all pieces before n.  So the slots for piece n are free (or hold it already), and every
// rank can put it; then every rank can take it; then, once other hosts have sent what it needs, every rank can collect
// it.
//
// Why the hosts cannot block each other.  A message waits in its connection until it is asked for, and holds up those
// behind it.  The kernel's buffers may be smaller than a message: its sender then keeps it, and waits too.  An
// operation enters only when all pieces of the one before have been exchanged, which implies that its messages are all
// in their connections; so no message waits for one of a later operation.  Within an operation, take again the first
// piece n that some rank has not collected.  Every rank can enter and take the pieces from n to n + s - 1, unless it
// waits for a message to put them.  What piece n needs comes through, because an operation sees to it that
//   1. others send it in their piece n or an earlier one,
//   2. what is in front of it in its connection is asked for in pieces before n + s, by entering or taking them, or
//      by exchanging them within the host (nothing of a piece from n + s on is in front, as its sender has collected
//      piece n by then), and
//   3. where a piece waits until what it sends is on its way, the receiver asks for that in its own piece of the same
//      number or an earlier one.
//
// Memory order.  `put` and `taken` are stored with release and read by other ranks with acquire.  Whoever sees a stage
// thus sees the data that was written before it, and whatever was read before it had been read when the slot is
// overwritten.  The counters are the only atomics that order data; each is written by its own rank only.

#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "fifo.hpp"
#include "idle_memory.hpp"
#include "layout.hpp"
#include "network.hpp"
#include "shared_slots.hpp"
#include "team.hpp"
#include "transfer.hpp"

namespace cpulaunch {

class Hierarchy;

// A piece of an operation: its number there, and among all of the group's since the beginning.
struct Piece {
  uint64_t of_operation, of_all;

  operator uint64_t() const { return of_operation; }
  Piece before(uint64_t count) const { return {of_operation - count, of_all - count}; }
};

// A collective operation of this rank, in pieces.  Pieces are numbered from 0; the ranks of a host have equally many.
class Operation {
 public:
  Operation(Signature signature, size_t piece_bytes) : signature(signature), piece_bytes(piece_bytes) {}
  virtual ~Operation() = default;

  virtual uint64_t pieces() const = 0;
  // Whether pieces() is known by now.
  virtual bool is_ready() const { return true; }
  // Called once before the first piece enters, also where there are no pieces.
  virtual void begin() {}

  // The stages of a piece.  A stage that answers false is called again later, and one that answers true is not.
  virtual void enter(Piece) {}
  virtual bool can_put(Piece) { return true; }
  virtual void put(Piece) {}
  virtual void take(Piece) {}
  virtual bool start(Piece) { return true; }
  virtual bool exchange(Piece) { return true; }
  // Whether the piece has something to collect, once the others have taken theirs.
  virtual bool collects(Piece) const { return false; }
  virtual void collect(Piece) {}

  // Whether nothing that began outside of the pieces is under way.
  virtual bool is_drained() { return true; }

  Signature signature;  // its sequence number is set when the operation starts
  SharedBlocks::Place tensor;  // where it is, if other local ranks may use it there
  const size_t piece_bytes;  // of one piece: a caller that waits wants to look at the clock in between

 private:
  friend class Hierarchy;
  bool begun_ = false, collected_ = false;
};

class Hierarchy final : public std::enable_shared_from_this<Hierarchy>, private IdleMemory {
 public:
  // `slots` may be null where this rank is alone on its host, and `network` where there is one host.  All local ranks
  // have introduced themselves.
  Hierarchy(Layout layout, std::shared_ptr<SharedSlots> slots, std::unique_ptr<Network> network);
  ~Hierarchy();

  // The ranks start the same operations in the same order.  The transfer's test() throws std::runtime_error where they
  // don't.
  std::unique_ptr<Transfer> start(std::shared_ptr<Operation> operation);
  // Throws Mismatch where a rank has sent what shows that they didn't.
  void check_unasked();
  // Returns when the ranks are connected, as far as they need to be.
  void meet();
  // Returns when the ranks of other hosts have what this one has sent.
  void leave_network();
  // And the other local ranks wait in vain from here on, if this rank hasn't completed what they call.
  void leave();
  // The slots' memory, and what pieces were staged in.
  size_t give_back(IdleMemory::Time now) override;

  // --- for operations

  const Layout layout;
  const SharedSlots::Shape shape;
  char* slot(int local, Piece piece) const { return slots_->slot(local, piece.of_all); }
  // The index of a piece among those that are under way: below SharedSlots::kMaxSlots.
  size_t index(Piece piece) const { return piece.of_all % shape.slots; }
  // For a piece that this rank takes: whether all local ranks may read each other's memory.
  bool reads_directly() const;
  // The tensor of a local rank that has put this piece, of `bytes`; null where it isn't shared.  It is this
  // rank's from when it takes the piece until it has exchanged it.
  char* tensor(int local, Piece piece, size_t bytes);
  // For a piece that this rank has taken: tells the other local ranks how far it is reduced, and whether one of them
  // has said so.
  using Mark = std::atomic<uint64_t> (SharedSlots::Counters::*)[SharedSlots::kMaxSlots];
  void set_mark(Mark mark, Piece piece);
  bool has_mark(Mark mark, int local, Piece piece) const;
  // Memory for a piece from its entry until it is collected.
  char* staging(Piece piece, size_t bytes) { return staging_[index(piece)].of(bytes); }
  // Memory of an operation for what several of its pieces need, until all of them have been exchanged between hosts.
  static constexpr size_t kStretches = SharedSlots::kMaxSlots / 2 + 1;
  char* stretch(size_t index, size_t bytes) { return staging_[SharedSlots::kMaxSlots + index].of(bytes); }
  // For what a stage copies and sums.  A stage leaves nothing in it.
  Batch& batch() { return batch_; }
  const SharedSlots& slots() const { return *slots_; }
  Network& network() { return *network_; }
  Tag tag(const Operation& operation, uint64_t piece, size_t phase = 0, size_t lane = 0) const;

 private:
  class Progress;  // the transfer of one operation

  // How far a stage has come.
  struct Cursor {
    uint64_t number = 0;        // of pieces since the beginning
    uint64_t operation = 0;     // since the beginning
    uint64_t of_operation = 0;  // of its pieces

    Piece piece() const { return {of_operation, number}; }
    void pass() { ++number, ++of_operation; }
  };
  using Counter = std::atomic<uint64_t> SharedSlots::Counters::*;

  // Does the next steps that can be done now, for whichever operation.
  // True when `operation` is complete.  Throws Mismatch where ranks differ in this operation, or in one that is
  // complete here.
  bool advance(Operation& operation);
  void abort();
  // Whether nothing is in this rank's slots that somebody still needs.
  bool is_idle() const;
  std::string stragglers();
  // The local ranks that have put, or taken, less than this one has put.
  std::vector<int> behind(Counter counter) const;
  std::set<int> needed();
  Cause lost();

  // The operation of the cursor's next piece, to which it moves the cursor; null where there is none, or not yet.
  Operation* move_on(Cursor& cursor);
  bool others_passed(Counter counter, uint64_t number) const;
  void check_alike(const Operation& operation) const;

  // Each returns how many bytes it was about; 0: nothing can be done now.
  size_t step();
  size_t collect();
  size_t exchange();
  size_t start_piece();
  size_t take();
  size_t put();
  size_t enter();

  const std::shared_ptr<SharedSlots> slots_;
  const std::unique_ptr<Network> network_;
  MappedBlocks mapped_;
  struct Staging {
    char* of(size_t needed);

    std::unique_ptr<char[]> memory;
    size_t bytes = 0;
  };
  std::array<Staging, SharedSlots::kMaxSlots + kStretches> staging_;
  Batch batch_;

  // Relaxed: it orders nothing, and a poller that reads an old value polls once more.
  std::atomic<uint64_t> steps_{0};
  std::mutex mutex_;
  Fifo<std::shared_ptr<Operation>> operations_;        // those that are not collected
  uint64_t gone_ = 0;                                  // operations before these
  Cursor entered_, put_, taken_, started_, exchanged_, collected_;
  std::array<uint64_t, SharedSlots::kMaxSlots> done_{};  // for each slot, 1 + the last piece in it that is exchanged
  IdleMemory::Time last_start_ = IdleMemory::now();
  bool holds_memory_ = false;  // since an operation has been started
  bool aborted_ = false;
  std::optional<Mismatch> mismatch_;  // once there is one, nothing moves any more
};

}  // namespace cpulaunch
