// Memory for tensors that the other ranks of the host read and write where it is, instead of through slots.
//
// A block is a page with a header, then the memory.  Its rank says in shared memory where a tensor lies (Place), and
// the others map the block when they first need it.  The header tells them when its rank has freed it.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cpulaunch {

class SharedBlocks {
 public:
  // Where memory lies.
  struct Place {
    uint32_t block = 0;  // its number among this process's, from 1; 0: in none
    int32_t descriptor = -1;
    uint64_t offset = 0;  // bytes from the beginning of the block

    explicit operator bool() const { return block != 0; }
  };

  // A copy of these bytes, in memory that other processes may map; null where there is none to be had.  Any thread may
  // call these.
  static char* copy(const char* from, size_t bytes);
  // This many bytes, whatever is in them; null where there are none to be had.  They may be some that were freed: the
  // other ranks have mapped these, and the kernel needn't clear them.
  static char* take(size_t bytes);
  // What was taken is kept for who takes as much within IdleMemory::kAfter, but no more in all than was taken at one
  // time.
  static void free(char* memory);
  // Gives back what is kept.
  static void drop_spares();
  static Place find(const char* memory, size_t bytes);
};

// The blocks of other processes that this one has mapped.  One thread at a time may use it.
class MappedBlocks {
 public:
  MappedBlocks() = default;
  ~MappedBlocks();
  MappedBlocks(const MappedBlocks&) = delete;
  MappedBlocks& operator=(const MappedBlocks&) = delete;

  // The `bytes` that lie there in the process `pid`.  Throws std::runtime_error where they can't be mapped.
  char* at(int pid, const SharedBlocks::Place& place, size_t bytes);
  // Unmaps what has been freed.
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
