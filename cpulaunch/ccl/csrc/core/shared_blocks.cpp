#include "shared_blocks.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "forked.hpp"
#include "shared_file.hpp"

namespace cpulaunch {

namespace {

constexpr size_t kHeaderSize = 4096;  // bytes: a page

struct Header {
  int32_t pid;
  uint32_t block;
  std::atomic<bool> freed;
};

struct Block {
  uint32_t number;
  int descriptor;
  size_t size;
};

struct Blocks {
  std::mutex mutex;
  uint32_t last = 0;
  std::map<const char*, Block> by_memory;
};

// Never destroyed: tensors may outlive everything else.
//
// A process that is forked gets tensors of its own: what it writes to them isn't for the other ranks.
Blocks& blocks() {
  static auto* all = [] {
    pthread_atfork([] { blocks().mutex.lock(); }, [] { blocks().mutex.unlock(); },
                   [] {
                     for (const auto& [memory, block] : blocks().by_memory) {
                       make_private(const_cast<char*>(memory) - kHeaderSize, block.descriptor, block.size);
                     }
                     blocks().mutex.unlock();
                   });
    return new Blocks;
  }();
  return *all;
}

Header& header_of(char* whole) { return *reinterpret_cast<Header*>(whole); }

}  // namespace

char* SharedBlocks::copy(const char* from, size_t bytes) {
  const size_t size = kHeaderSize + bytes;
  const int descriptor = create_shared_file(size);
  if (descriptor < 0) return nullptr;
  char* whole = map_shared_file(descriptor, size);
  if (!whole) {
    close(descriptor);
    return nullptr;
  }
  char* memory = whole + kHeaderSize;
  if (bytes) std::memcpy(memory, from, bytes);
  use_huge_pages(whole, size);
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  const Block block{++all.last, descriptor, size};
  header_of(whole).pid = getpid();
  header_of(whole).block = block.number;
  all.by_memory.emplace(memory, block);
  return memory;
}

void SharedBlocks::free(char* memory) {
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_memory.find(memory);
  const auto block = found->second;
  all.by_memory.erase(found);
  // A process that was forked has a copy of the tensor, and no say about the memory.
  char* whole = memory - kHeaderSize;
  if (!is_forked()) {
    header_of(whole).freed.store(true, std::memory_order_release);
    empty_shared_file(block.descriptor, kHeaderSize, block.size);  // the others unmap it with their next operation
  }
  munmap(whole, block.size);
  close(block.descriptor);
}

SharedBlocks::Place SharedBlocks::find(const char* memory, size_t bytes) {
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.by_memory.upper_bound(memory);
  if (found == all.by_memory.begin()) return {};
  const auto& [begin, block] = *--found;
  const size_t offset = memory - begin + kHeaderSize;
  if (offset + bytes > block.size || is_forked()) return {};
  return {block.number, block.descriptor, offset};
}

// --- other processes'

MappedBlocks::~MappedBlocks() {
  for (const auto& mapping : mappings_) munmap(mapping.whole, mapping.size);
}

char* MappedBlocks::at(int pid, const SharedBlocks::Place& place, size_t bytes) {
  auto found = std::find_if(mappings_.begin(), mappings_.end(), [&](const Mapping& each) {
    return each.pid == pid && each.block == place.block;
  });
  if (found == mappings_.end()) {
    const auto [whole, size] = open_shared_file(pid, place.descriptor);
    if (!whole) {
      throw std::runtime_error("this rank can't map a tensor that process " + std::to_string(pid) +
                               " shares: " + std::strerror(errno));
    }
    found = mappings_.insert(mappings_.end(), {pid, place.block, whole, size});
  }
  // It may be another file: a number is given anew once its file is closed.
  const bool fits = found->size >= kHeaderSize && place.offset + bytes <= found->size;
  if (!fits || header_of(found->whole).pid != pid || header_of(found->whole).block != place.block) {
    throw std::runtime_error("process " + std::to_string(pid) + " shares no tensor where it says");
  }
  return found->whole + place.offset;
}

void MappedBlocks::drop_freed() {
  for (auto each = mappings_.begin(); each != mappings_.end();) {
    if (header_of(each->whole).freed.load(std::memory_order_acquire)) {
      munmap(each->whole, each->size);
      each = mappings_.erase(each);
    } else {
      ++each;
    }
  }
}

}  // namespace cpulaunch
