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
// Pieces start in their order, which is the same on all hosts.  Their exchanges may end in any order.
//
// Each operation decides which of these stages it needs, and what happens in them (hierarchical_*.cpp).  For a sum:
//   put       the parts of the piece that other local ranks sum go to this rank's slot
//   take      this rank sums its part over all local ranks
//   start     this rank begins to sum its part over all hosts
//   exchange  it goes on with that, and writes the sum to the other local ranks' slots
//   collect   the parts that the others have summed go from this rank's slot to its tensor
//
//
// Why no rank reads or writes a slot that is being overwritten.  With s slots, rank r overwrites slot n % s when it
// puts piece n + s.  Before that
//   1. it has collected piece n itself, so it no longer reads that slot (the threads of a rank take turns under
//      mutex_), and
//   2. it has seen taken[q] > n of every other local rank q.  Rank q reads rank r's slot and its signature, and writes
//      to it, only while it takes and exchanges piece n.  It raises taken[q] after that.
// No other rank touches the slot in the meantime: the ranks use other slots for the pieces in between.  They access
// this slot for piece n + s only after rank r has raised put[r] to n + s + 1, and it does that after it has written the
// slot.
//
// Why the ranks of a host cannot block each other.  Take the first piece n that some rank has not collected.  All ranks
// have collected, and so taken, all pieces before n.  So the slots for piece n are free (or hold it already), and every
// rank can put it; then every rank can take it; then, once other hosts have sent what it needs, every rank can collect
// it.
//
// Why the hosts cannot block each other.  A message waits in its connection until the receiver asks for it, and holds
// up the messages behind it.  The kernel's buffers may be smaller than a message: then the sender keeps it, and waits,
// too.  An operation enters only when all pieces of the previous operation have been exchanged, which implies that the
// messages of that operation are all in their connections.  So no message waits for one of a later operation.  Within
// an operation, take again the first piece n that some rank has not collected.  Every rank can enter and take the
// pieces from n to n + s - 1, unless it waits for a message to put them.  What piece n needs gets through, because
// every operation makes sure of this:
//   1. Other ranks send it in their piece n or an earlier one.
//   2. The receiver asks for everything in front of it in its connection while it enters or takes pieces before n + s,
//      or exchanges them within the host.  (Messages of piece n + s or later ones are not in front, because their
//      sender has collected piece n by then.)
//   3. If a piece waits until its messages are sent, the receiver asks for them in its own piece of the same number or
//      an earlier one.
//
// Memory order.  `put` and `taken` are stored with release and read by other ranks with acquire.  So a rank that sees
// that a stage is done also sees the data that was written before that.  And whatever was read before that had been
// read by the time the slot is overwritten.  The counters are the only atomics that order data; each is written by its
// own rank only.

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

// A piece of an operation: its number in the operation, and its number among all pieces of the group so far.
struct Piece {
  uint64_t of_operation, of_all;

  operator uint64_t() const { return of_operation; }
  Piece before(uint64_t count) const { return {of_operation - count, of_all - count}; }
};

// A collective operation of this rank, in pieces.  Pieces are numbered from 0; all ranks of a host have the same number
// of pieces.
class Operation {
 public:
  Operation(Signature signature, size_t piece_bytes) : signature(signature), piece_bytes(piece_bytes) {}
  virtual ~Operation() = default;

  virtual uint64_t pieces() const = 0;
  // Whether the result of pieces() is known yet.
  virtual bool is_ready() const { return true; }
  // Called once before the first piece enters, even if there are no pieces.
  virtual void begin() {}

  // The stages of a piece.  A stage that returns false is called again later; one that returns true is not.
  virtual void enter(Piece) {}
  virtual bool can_put(Piece) { return true; }
  virtual void put(Piece) {}
  virtual void take(Piece) {}
  virtual bool start(Piece) { return true; }
  virtual bool exchange(Piece) { return true; }
  // Whether this rank has something to collect once the others have taken the piece.
  virtual bool collects(Piece) const { return false; }
  virtual void collect(Piece) {}

  // False while anything is under way that began outside of the pieces.
  virtual bool is_drained() { return true; }

  Signature signature;  // its sequence number is set when the operation starts
  SharedBlocks::Place tensor;  // the tensor's place, if other local ranks may use it in place
  const size_t piece_bytes;  // the size of a piece; limited, because a waiting caller looks at the clock between pieces

 private:
  friend class Hierarchy;
  bool begun_ = false, collected_ = false;
};

// Operations to start one after the other; `second` may be null.
using OperationPtr = std::shared_ptr<Operation>;
struct Operations {
  OperationPtr first, second = nullptr;
};

class Hierarchy final : public std::enable_shared_from_this<Hierarchy>, private IdleMemory {
 public:
  // `slots` may be null if this rank is alone on its host, and `network` if there is only one host.  All local ranks
  // must have introduced themselves.
  Hierarchy(Layout layout, std::shared_ptr<SharedSlots> slots, std::unique_ptr<Network> network);
  ~Hierarchy();

  // All ranks must start the same operations in the same order.  If they don't, the transfer's test() throws
  // std::runtime_error.
  std::unique_ptr<Transfer> start(Operations operations);
  // Throws Mismatch if a message of another rank shows that they didn't.
  void check_unasked();
  // Returns when the ranks are connected, as far as collectives need that.
  void meet();
  // Returns whether the ranks of other hosts have received what this one has sent; call it until they have.
  bool leave_network();
  // Announces to the other local ranks that this rank has left.  From now on, they wait in vain in operations that this
  // rank hasn't completed.
  void leave();
  // Gives back the memory of the slots, and of staged pieces.
  size_t give_back(IdleMemory::Time now) override;

  // --- for operations

  const Layout layout;
  const SharedSlots::Shape shape;
  char* slot(int local, Piece piece) const { return slots_->slot(local, piece.of_all); }
  // The index of a piece among those that are under way: below SharedSlots::kMaxSlots.
  size_t index(Piece piece) const { return piece.of_all % shape.slots; }
  // For a piece that this rank takes: whether all local ranks may read each other's memory.
  bool reads_directly() const;
  // Returns the tensor, of `bytes`, of a local rank that has put this piece; null if it isn't shared.  This rank may
  // use the tensor from when it takes the piece until it has exchanged it.
  char* tensor(int local, Piece piece, size_t bytes);
  // For a piece that this rank has taken.  A mark says how far its rank has reduced the piece: set_mark() sets this
  // rank's, and has_mark() checks whether another local rank has set its own.
  using Mark = std::atomic<uint64_t> (SharedSlots::Counters::*)[SharedSlots::kMaxSlots];
  void set_mark(Mark mark, Piece piece);
  bool has_mark(Mark mark, int local, Piece piece) const;
  // Memory for a piece from its entry until it is collected.
  char* staging(Piece piece, size_t bytes) { return staging_[index(piece)].of(bytes); }
  // Memory that several pieces of an operation share, until all of these have been exchanged between hosts.
  static constexpr size_t kStretches = SharedSlots::kMaxSlots / 2 + 1;
  char* stretch(size_t index, size_t bytes) { return staging_[SharedSlots::kMaxSlots + index].of(bytes); }
  // Used by a stage for its copies and sums; empty after each stage.
  Batch& batch() { return batch_; }
  const SharedSlots& slots() const { return *slots_; }
  Network& network() { return *network_; }
  Tag tag(const Operation& operation, uint64_t piece, size_t phase = 0, size_t lane = 0) const;

 private:
  class Progress;  // the transfer of one or two operations

  // How far a stage has come.
  struct Cursor {
    uint64_t number = 0;        // pieces since the beginning
    uint64_t operation = 0;     // operations since the beginning
    uint64_t of_operation = 0;  // pieces of this operation

    Piece piece() const { return {of_operation, number}; }
    void pass() { ++number, ++of_operation; }
  };
  using Counter = std::atomic<uint64_t> SharedSlots::Counters::*;

  // Does the steps that are possible now, of any operation.  Returns true when `operation` is complete.  Throws
  // Mismatch if the ranks' calls differ in this operation, or in one that this rank has completed.
  bool advance(Operation& operation);
  void abort();
  // Whether nobody needs anything in this rank's slots any more.
  bool is_idle() const;
  std::string stragglers();
  // The local ranks that have put, or taken, fewer pieces than this one has put.
  std::vector<int> behind(Counter counter) const;
  std::set<int> needed();
  Cause lost();

  // Moves the cursor to its next piece, and returns that piece's operation; null if there is none yet.
  Operation* move_on(Cursor& cursor);
  bool others_passed(Counter counter, uint64_t number) const;
  void check_alike(const Operation& operation) const;

  // Each returns how many bytes it has handled; 0 if nothing can be done now.
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
  Fifo<OperationPtr> operations_;                       // operations that are not complete
  uint64_t gone_ = 0;                                  // number of operations before these
  Cursor entered_, put_, taken_, started_, exchanged_, collected_;
  std::array<uint64_t, SharedSlots::kMaxSlots> done_{};  // for each slot, 1 + the number of its last exchanged piece
  IdleMemory::Time last_start_ = IdleMemory::now();
  bool holds_memory_ = false;  // since an operation has been started
  bool aborted_ = false;
  std::optional<Mismatch> mismatch_;  // once there is one, nothing moves any more
};

}  // namespace cpulaunch
