// Memory that the ranks of a host share, through which they pass data on in pieces.
//
// The memory: a page-aligned block of counters, then some slots for each rank (here three ranks with two slots each).
// Piece n of a rank goes to its slot n % (number of slots).
//
//     counters            slots of rank 0           slots of rank 1           slots of rank 2
//   ┌───────────┐     ┌──────────┬──────────┐   ┌──────────┬──────────┐   ┌──────────┬──────────┐
//   │ put       │     │ piece 6  │ piece 7  │   │ piece 6  │ piece 7  │   │ piece 6  │ piece 7  │
//   │ pieces    │     │          │          │   │          │          │   │          │          │
//   │ taken     │     │          │          │   │          │          │   │          │          │
//   │ of each   │     │          │          │   │          │          │   │          │          │
//   │ rank      │     │          │          │   │          │          │   │          │          │
//   └───────────┘     └──────────┴──────────┘   └──────────┴──────────┘   └──────────┴──────────┘
//
// hierarchy.hpp says in which order ranks read and write them.
//
// Then a ring for each pair of ranks, for what one sends another.  Memory that nobody touches takes no room.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "layout.hpp"
#include "shared_blocks.hpp"
#include "signature.hpp"

namespace cpulaunch {

// Memory that a rank offers to the others of its host: a descriptor, in its process.
struct ShmOffer {
  int pid = 0;
  int descriptor = -1;  // -1: there is none
};

class SharedSlots {
 public:
  static constexpr size_t kMaxSlots = 4;
  static constexpr size_t kCacheLine = 64;  // bytes

  // How many pieces a rank has put and taken since the beginning, and of what.
  struct Counters {
    // On a cache line of its own with what is read with it: it is written once for each piece, and polled by all.
    alignas(kCacheLine) std::atomic<uint64_t> put;
    // What follows is written before `put`, and read after it, but for the first two, which introduce() writes.
    int32_t pid;
    uint64_t address;   // of this, in the memory of its rank
    bool reads_others;  // whether the kernel lets this rank read the memory of the others
    struct {
      alignas(kCacheLine) Signature signature;
      SharedBlocks::Place tensor;
    } pieces[kMaxSlots];
    alignas(kCacheLine) std::atomic<uint64_t> taken;
    std::atomic<bool> has_left;  // the group, and so takes nothing any more
    // For each slot, the number of the piece in it, from 1, once this rank has reduced its parts of it so far.
    alignas(kCacheLine) std::atomic<uint64_t> on_socket[kMaxSlots], everywhere[kMaxSlots];
  };

  // A stream of bytes from one rank to another.  Byte n is at data[n % kRingSize].
  static constexpr size_t kRingSize = 64 << 10;
  struct Ring {
    alignas(kCacheLine) std::atomic<uint64_t> written;  // since the beginning, by the one
    alignas(kCacheLine) std::atomic<uint64_t> read;     // and by the other
    alignas(kCacheLine) char data[kRingSize];
  };

  // The slots of a rank, and the bytes of each.
  struct Shape {
    explicit Shape(const Layout& layout);

    size_t slots, slot_size;
  };

  // A descriptor of memory for the ranks of one host: without a name, so that nothing of it can stay behind.  -1 where
  // there is none to be had.
  static int offer(int locals, Shape shape);
  // Null where this rank may not open the memory (it belongs to another user, for example), or where it is something
  // else.
  static std::shared_ptr<SharedSlots> map(const ShmOffer& offer, int locals, Shape shape);

  ~SharedSlots();
  SharedSlots(const SharedSlots&) = delete;
  SharedSlots& operator=(const SharedSlots&) = delete;

  // Says which process is this local rank, for the others to read its memory.
  void introduce(int local);
  // Whether this process may read the memory of all local ranks.  They have introduced themselves.
  bool can_read_all() const;
  // Copies what another local rank has at an address.  Throws std::runtime_error where the kernel doesn't let this
  // process, or the other one has ended.
  void read(int local, char* to, uint64_t address, size_t bytes) const;

  Counters& counters(int local) const { return counters_[local]; }
  char* slot(int local, uint64_t piece) const;
  Ring& ring(int from, int to) const;
  // Gives the memory of a local rank's slots back to the system; zeroes are there then.  Returns how many bytes it was
  // at most.
  size_t give_back(int local) const;

 private:
  SharedSlots(char* memory, int locals, Shape shape);

  char* const memory_;
  Counters* const counters_;
  const int locals_;
  const Shape shape_;
};

}  // namespace cpulaunch
