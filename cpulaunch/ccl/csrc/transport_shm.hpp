// Sums tensors among the ranks of one host, through memory that they share.
//
// oneCCL has large messages copied from process to process by the kernel, whole, so that each byte passes through
// main memory several times.  Here a tensor goes through in pieces that stay in the cores' caches.
//
//
// The memory: a page-aligned block of counters, then two slots for each rank (here three ranks).  A slot has room for
// a piece, and a piece has a part for each rank to sum.  Piece n of a rank goes to its slot n % 2.
//
//     counters            slots of rank 0           slots of rank 1           slots of rank 2
//   ┌───────────┐     ┌──────────┬──────────┐   ┌──────────┬──────────┐   ┌──────────┬──────────┐
//   │ put       │     │ piece 6  │ piece 7  │   │ piece 6  │ piece 7  │   │ piece 6  │ piece 7  │
//   │ signatures│     ├──────────┼──────────┤   ├──────────┼──────────┤   ├──────────┼──────────┤
//   │ summed    │     │  part 0  │          │   │  part 0  │          │   │  part 0  │          │
//   │ of each   │     │  part 1  │          │   │  part 1  │          │   │  part 1  │          │
//   │ rank      │     │  part 2  │          │   │  part 2  │          │   │  part 2  │          │
//   └───────────┘     └──────────┴──────────┘   └──────────┴──────────┘   └──────────┴──────────┘
//
// The stages of piece n in rank r.  Each rank goes through them at its own pace, piece by piece:
//
//            put                          sum                                  collect
//   tensor ───────► own slot    part r of all slots ──► sum ──┬─► tensor   own slot ─────────► tensor
//    (all but part r, which                                   └─► part r of    (all but part r)
//     is read from the tensor)                                    the others' slots
//
//            put[r] = n + 1               summed[r] = n + 1                    (known to rank r only)
//
//   needs: the slot is free      put[q] > n of all other ranks q      summed[q] > n of all other ranks q
//
// All ranks add in the order of the ranks, so that all get the same bits; bfloat16 is summed in float32 and rounded
// once.  With little data each rank sums the whole piece into its tensor instead.  Then nothing is written to others'
// slots, and collecting needs no second wait for the others.
//
//
// Why no rank reads or writes a slot that is being overwritten.  Rank r overwrites slot n % 2 when it puts piece
// n + 2.  Before that
//   1. it has collected piece n itself, so that it reads nothing from there any more (threads of one rank take turns
//      under mutex_), and
//   2. it has seen summed[q] > n of every other rank q.  Rank q reads rank r's slot and its signature, and writes its
//      sum to it, only while it sums piece n.  It raises summed[q] after that.
// Nobody else touches the slot: for piece n + 1 the ranks use the other slot, and they turn to piece n + 2 in this one
// only after rank r has raised put[r] to n + 3, which it does after it has written the slot.
//
// Why two slots are enough.  The ranks cannot block each other: take the first piece n that some rank has not
// collected.  All ranks have collected, and so summed, all pieces before n.  So the slots for piece n are free (or
// hold it already), and every rank can put it; then every rank can sum it; then every rank can collect it.  This
// holds with one slot, too.  The second one lets a rank put piece n + 1 while others still sum piece n.  A third one
// would let a rank get further ahead of others that it has to wait for anyway, and take room in the caches.
//
// Memory order.  `put` and `summed` are stored with release and read by other ranks with acquire.  Whoever sees a
// stage thus sees the data that was written before it, and whatever was read before it had been read when the slot is
// overwritten.  The counters are the only atomics that order data; each is written by its own rank only.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include <c10/core/ScalarType.h>

#include "transfer.hpp"

namespace c10d {
struct ReduceOp;
}

namespace cpulaunch {

// Memory that rank 0 of a group offers to the others: a descriptor, in its process.
struct ShmOffer {
  int pid = 0;
  int descriptor = -1;  // -1: there is none
};

// Whether a group sums in shared memory is decided here and nowhere else:
//   1. offer(), in rank 0 before the ranks meet: does the user leave the choice to us, and is there memory?
//   2. join(), in every rank when the ranks have met: are all ranks on this host, and can this one map the memory?
//   3. The group asks all ranks whether they have joined.  If one has not, nobody uses the memory.
//   4. takes(), for each tensor: can its numbers be summed here?
class ShmAllreduce : public std::enable_shared_from_this<ShmAllreduce> {
 public:
  // A descriptor of memory for `size` ranks: without a name, so that nothing of it can stay behind.  -1 where it is
  // not wanted or not to be had.
  static int offer(int size);
  // Null where this rank cannot take part.
  static std::shared_ptr<ShmAllreduce> join(const ShmOffer& offer, int rank, int size, bool one_host);
  // Sums of float32, float64, bfloat16, and complex numbers of these; also those that are scaled before or after.
  static bool takes(c10::ScalarType type, const c10d::ReduceOp& op);

  ~ShmAllreduce();
  ShmAllreduce(const ShmAllreduce&) = delete;
  ShmAllreduce& operator=(const ShmAllreduce&) = delete;

  // Has the `count` elements at `data` become their sum over all ranks.  The ranks start the same sums in the same
  // order; test() throws std::runtime_error where their tensors differ in size or type.
  std::unique_ptr<Transfer> start(void* data, size_t count, c10::ScalarType type);

 private:
  class Sum;  // the transfer of one tensor

  static constexpr uint64_t kSlots = 2;  // of each rank
  static constexpr size_t kCacheLine = 64;  // bytes

  // How many pieces a rank has put and summed since the beginning, and what is in its slots.
  struct Counters {
    // On a cache line of its own with what is read with it: it is written once for each piece, and polled by all.
    alignas(kCacheLine) std::atomic<uint64_t> put;
    size_t signatures[kSlots];  // written before `put`, read after it
    alignas(kCacheLine) std::atomic<uint64_t> summed;
  };
  using Stage = std::atomic<uint64_t> Counters::*;

  struct Format;  // of numbers
  static const Format* format_of(c10::ScalarType type);

  struct Piece {
    char* data;
    size_t bytes;
    size_t left;  // bytes to the tensor's end, with this piece
    const Format* format;

    size_t signature() const;
  };

  struct Range {
    size_t begin, end;
  };

  ShmAllreduce(void* memory, int rank, int size);
  static size_t memory_size(int size);  // bytes

  // Does the next steps that can be done now, for whichever tensor.  True when all pieces before `piece` are
  // collected.
  bool advance(uint64_t piece);
  void abort();
  std::string stragglers();

  const Piece& piece(uint64_t number) const { return pieces_[number - collected_]; }
  char* slot(int rank, uint64_t number) const;
  bool is_whole(const Piece& piece) const;
  Range part(const Piece& piece, int rank) const;
  bool others_passed(Stage stage, uint64_t number) const;
  bool is_free(uint64_t number) const;  // this rank's slot of that piece

  // Each returns how many bytes it was about; 0: nothing can be done now.
  size_t step();
  size_t put(uint64_t number);
  size_t sum(uint64_t number);
  size_t collect(uint64_t number);
  void check_alike(uint64_t number) const;
  static std::string shown(size_t signature);

  const int rank_;
  const int size_;
  const size_t piece_size_;  // bytes
  char* const memory_;
  Counters* const counters_;  // of each rank

  // Relaxed: it orders nothing, and a poller that reads an old value polls once more.
  std::atomic<uint64_t> steps_{0};
  std::mutex mutex_;
  std::deque<Piece> pieces_;  // those that are not collected
  uint64_t added_ = 0, put_ = 0, summed_ = 0, collected_ = 0;
  bool aborted_ = false;
};

}  // namespace cpulaunch
