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
#include <vector>

#include "forked.hpp"
#include "idle_memory.hpp"
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
  bool is_reused;

  size_t room() const { return size - kHeaderSize; }
};

// A freed block, kept for the next take() of about its size.
struct Spare {
  char* memory;
  Block block;
  IdleMemory::Time since;
};

void unmap(char* memory, const Block& block) {
  munmap(memory - kHeaderSize, block.size);
  close(block.descriptor);
}

// Gives the memory back to the system, even while other processes still map it.  They unmap it in their next operation.
void destroy(char* memory, const Block& block) {
  reinterpret_cast<Header*>(memory - kHeaderSize)->freed.store(true, std::memory_order_release);
  empty_shared_file(block.descriptor, kHeaderSize, block.size);
  unmap(memory, block);
}

struct Blocks final : private IdleMemory {
  std::mutex mutex;
  uint32_t last = 0;
  std::map<const char*, Block> by_memory;
  std::vector<Spare> spares;  // in the order in which they were freed
  size_t used = 0, most_used = 0;  // bytes of the blocks of take() in use, now and at most

  Blocks() { join(); }

  // Takes the smallest spare block with `room` to twice `room` bytes; null if there is none.
  char* take_spare(size_t room) {
    auto best = spares.end();
    for (auto each = spares.begin(); each != spares.end(); ++each) {
      const size_t has = each->block.room();
      if (has >= room && has / 2 <= room && (best == spares.end() || has < best->block.room())) best = each;
    }
    if (best == spares.end()) return nullptr;
    const auto [memory, block, since] = *best;
    spares.erase(best);
    add(memory, block);
    return memory;
  }

  void add(char* memory, const Block& block) {
    by_memory.emplace(memory, block);
    if (!block.is_reused) return;
    used += block.size;
    most_used = std::max(most_used, used);
  }

  // Destroys spare blocks, the oldest first, until they and the blocks in use have at most `bytes`.
  void drop_spares_beyond(size_t bytes) {
    size_t spare = 0;
    for (const auto& each : spares) spare += each.block.size;
    auto first_kept = spares.begin();
    for (; first_kept != spares.end() && used + spare > bytes; ++first_kept) {
      spare -= first_kept->block.size;
      destroy(first_kept->memory, first_kept->block);
    }
    spares.erase(spares.begin(), first_kept);
  }

  size_t give_back(IdleMemory::Time now) override {
    const std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    if (!lock) return 0;
    size_t given = 0;
    auto first_kept = spares.begin();
    for (; first_kept != spares.end() && now - first_kept->since >= IdleMemory::kAfter; ++first_kept) {
      given += first_kept->block.size;
      destroy(first_kept->memory, first_kept->block);
    }
    spares.erase(spares.begin(), first_kept);
    if (spares.empty()) most_used = used;
    return given;
  }

  // Called in a forked process: makes its tensors private, so that the other ranks don't see what it writes.
  void become_private() {
    for (const auto& [memory, block] : by_memory) {
      make_private(const_cast<char*>(memory) - kHeaderSize, block.descriptor, block.size);
    }
    for (const auto& each : spares) unmap(each.memory, each.block);
    spares.clear();
  }
};

// Never destroyed, because tensors may outlive everything else.
Blocks& blocks() {
  static auto* all = [] {
    pthread_atfork([] { blocks().mutex.lock(); }, [] { blocks().mutex.unlock(); },
                   [] {
                     blocks().become_private();
                     blocks().mutex.unlock();
                   });
    return new Blocks;
  }();
  return *all;
}

Header& header_of(char* whole) { return *reinterpret_cast<Header*>(whole); }

// Returns null if there is no memory.
char* make_block(size_t size, bool is_reused) {
  const int descriptor = create_shared_file(size);
  if (descriptor < 0) return nullptr;
  char* whole = map_shared_file(descriptor, size);
  if (!whole) {
    close(descriptor);
    return nullptr;
  }
  use_huge_pages(whole, size);
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  const Block block{++all.last, descriptor, size, is_reused};
  header_of(whole).pid = getpid();
  header_of(whole).block = block.number;
  all.add(whole + kHeaderSize, block);
  return whole + kHeaderSize;
}

}  // namespace

char* SharedBlocks::copy(const char* from, size_t bytes) {
  char* memory = make_block(kHeaderSize + bytes, /*is_reused=*/false);
  if (memory && bytes) std::memcpy(memory, from, bytes);
  return memory;
}

char* SharedBlocks::take(size_t bytes) {
  if (is_forked()) return nullptr;
  auto& all = blocks();
  const size_t size = round_to_pages(kHeaderSize + bytes);
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    if (char* memory = all.take_spare(bytes)) return memory;
    all.drop_spares_beyond(std::max(all.most_used, all.used + size) - size);
  }
  return make_block(size, /*is_reused=*/true);
}

void SharedBlocks::free(char* memory) {
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_memory.find(memory);
  const auto block = found->second;
  all.by_memory.erase(found);
  if (is_forked()) {  // this process has a private mapping, and the memory belongs to its parent
    unmap(memory, block);
  } else if (block.is_reused) {
    all.used -= block.size;
    all.spares.push_back({memory, block, IdleMemory::now()});
  } else {
    destroy(memory, block);
  }
}

void SharedBlocks::drop_spares() {
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.drop_spares_beyond(0);
  all.most_used = all.used;
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

// --- blocks of other processes

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
  // Check the header: the descriptor may have been closed, and its number given to another file.
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
