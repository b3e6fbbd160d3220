// Memory that the ranks of a host share, and through which they exchange data in pieces.
//
// The memory consists of a page-aligned block of counters, then some slots for each rank (here three ranks with two
// slots each).  Piece n of a rank goes to its slot n % (number of slots).
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
// hierarchy.hpp describes in which order ranks read and write the slots.
//
// After the slots, there is a ring for each pair of ranks, for messages from one to the other.  Memory that no rank has
// touched takes no space.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "layout.hpp"
#include "shared_blocks.hpp"
#include "signature.hpp"

namespace cpulaunch {

// Memory that a rank offers to the others of its host, as a descriptor of its process.
struct ShmOffer {
  int pid = 0;
  int descriptor = -1;  // -1: no memory
};

class SharedSlots {
 public:
  static constexpr size_t kMaxSlots = 4;
  static constexpr size_t kCacheLine = 64;  // bytes

  // How many pieces a rank has put and taken since the beginning, and of which operations.
  struct Counters {
    // On a separate cache line, with the members that are read together with it, because it is written once per piece
    // and polled by all ranks.
    alignas(kCacheLine) std::atomic<uint64_t> put;
    // introduce() writes these two.
    int32_t pid;
    uint64_t address;   // of this struct, in the memory of its rank
    // The next members are written before `put`, and read after it.
    bool reads_others;  // whether the kernel lets this rank read the memory of the others
    struct {
      alignas(kCacheLine) Signature signature;
      SharedBlocks::Place tensor;
    } pieces[kMaxSlots];
    alignas(kCacheLine) std::atomic<uint64_t> taken;
    std::atomic<bool> has_left;  // this rank has left the group, and takes no more pieces
    // For each slot, the number (from 1) of the last piece in it whose parts this rank has reduced: over its socket, or
    // over all ranks.
    alignas(kCacheLine) std::atomic<uint64_t> on_socket[kMaxSlots], everywhere[kMaxSlots];
  };

  // A stream of bytes from one rank to another.  Byte n is at data[n % kRingSize].
  static constexpr size_t kRingSize = 64 << 10;
  struct Ring {
    alignas(kCacheLine) std::atomic<uint64_t> written;  // total bytes, by the sender
    alignas(kCacheLine) std::atomic<uint64_t> read;     // total bytes, by the receiver
    alignas(kCacheLine) char data[kRingSize];
  };

  // How many slots a rank has, and the bytes of each.
  struct Shape {
    explicit Shape(const Layout& layout);

    size_t slots, slot_size;
  };

  // Returns a descriptor of new memory for the ranks of one host; -1 if that fails.  The memory has no name, so it is
  // freed with the last process that uses it.
  static int offer(int locals, Shape shape);
  // Returns null if this rank may not open the memory, for example because it belongs to another user, or if its size
  // is wrong.
  static std::shared_ptr<SharedSlots> map(const ShmOffer& offer, int locals, Shape shape);

  ~SharedSlots();
  SharedSlots(const SharedSlots&) = delete;
  SharedSlots& operator=(const SharedSlots&) = delete;

  // Publishes which process is this local rank, so that the others can read its memory.
  void introduce(int local);
  // Whether this process may read the memory of all local ranks.  All must have called introduce().
  bool can_read_all() const;
  // Copies from an address in another local rank's memory.  Throws std::runtime_error if the kernel doesn't allow that,
  // or if the other process has ended.
  void read(int local, char* to, uint64_t address, size_t bytes) const;

  Counters& counters(int local) const { return counters_[local]; }
  char* slot(int local, uint64_t piece) const;
  Ring& ring(int from, int to) const;
  // Gives the memory of a local rank's slots back to the system.  It then reads as zeros.  Returns the number of bytes,
  // which may include some that were not in use.
  size_t give_back(int local) const;

 private:
  SharedSlots(char* memory, int locals, Shape shape);

  char* const memory_;
  Counters* const counters_;
  const int locals_;
  const Shape shape_;
};

}  // namespace cpulaunch
