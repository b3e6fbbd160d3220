// Memory for tensors that the other ranks of the host read and write in place, instead of through slots.
//
// A block is a page with a header, followed by the memory.  Its owner publishes each tensor's place in the block
// (Place) in the slots' counters.  The others map the block when they first need it.  The owner marks the header when
// it frees the block.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cpulaunch {

class SharedBlocks {
 public:
  // A place in a block.
  struct Place {
    uint32_t block = 0;  // the number of the process's block, from 1; 0: not in a block
    int32_t descriptor = -1;
    uint64_t offset = 0;  // bytes from the beginning of the block

    explicit operator bool() const { return block != 0; }
  };

  // All of these are thread-safe.

  // Copies `bytes` to a new block; null if there is no memory.
  static char* copy(const char* from, size_t bytes);
  // Returns uninitialized memory in a block; null if there is none.  The block may be a spare one, which was freed
  // before: the other ranks have mapped it already, and the kernel need not clear it.
  static char* take(size_t bytes);
  // Frees a block.  A block of take() becomes a spare block for IdleMemory::kAfter.  Together, spare blocks and blocks
  // in use never exceed the most that was in use at one time.
  static void free(char* memory);
  // Gives back all spare blocks.
  static void drop_spares();
  // Returns where this memory lies in a block; an empty Place if it is in none.
  static Place find(const char* memory, size_t bytes);
};

// The blocks of other processes that this one has mapped.  Not thread-safe.
class MappedBlocks {
 public:
  MappedBlocks() = default;
  ~MappedBlocks();
  MappedBlocks(const MappedBlocks&) = delete;
  MappedBlocks& operator=(const MappedBlocks&) = delete;

  // Returns the `bytes` at `place` in the process `pid`.  Throws std::runtime_error if they can't be mapped.
  char* at(int pid, const SharedBlocks::Place& place, size_t bytes);
  // Unmaps the blocks that their owners have freed.
  void drop_freed();

 private:
  struct Mapping {
    int pid;
    uint32_t block;
    char* whole;
    size_t size;
  };

  std::vector<Mapping> mappings_;
};

}  // namespace cpulaunch
