#include "shared_slots.hpp"

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "shared_file.hpp"

namespace cpulaunch {

namespace {

// The most bytes of a piece, measured with ranks of one thread.  A slot is small enough that two of them stay in the
// caches beside the tensor: one is filled while the other is read.  It is large enough that a step takes longer than
// the wait for it.  With two hosts and one or two ranks on each, smaller pieces keep the network busier.  With more
// than two hosts, a sum's pieces are split once more among the hosts, so smaller pieces would take too many system
// calls.
constexpr size_t kSlotSize = 512 << 10, kSlotSizeOfFew = 256 << 10, kSlotSizeOfManyHosts = 1 << 20;
// These sizes are multiplied by the number of threads of a rank: threads have separate caches, and each needs enough of
// a piece to be worth waking.  With more than two hosts, the share of each host of a row also has at least this size.
constexpr size_t kLeastRowShare = 64 << 10;
constexpr size_t kMostSlotSize = 8 << 20;
constexpr size_t kLeastPart = 256;  // bytes; small enough to give a part to each local rank, however many a machine has
constexpr size_t kPage = 4096;      // bytes

size_t size_of_slots(const Layout& layout) {
  const size_t measured = layout.hosts > 2 ? kSlotSizeOfManyHosts
                          : layout.hosts == 1 || layout.lanes > 2 ? kSlotSize : kSlotSizeOfFew;
  const size_t for_shares = layout.hosts > 2 ? layout.lanes * layout.longest_row() * kLeastRowShare : 0;
  return std::min(std::max(measured * layout.threads, for_shares), kMostSlotSize);
}

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

size_t slots_begin(int locals) { return round_up(locals * sizeof(SharedSlots::Counters), kPage); }

size_t rings_begin(int locals, SharedSlots::Shape shape) {
  return slots_begin(locals) + locals * shape.slots * shape.slot_size;
}

size_t memory_size(int locals, SharedSlots::Shape shape) {
  return rings_begin(locals, shape) + sizeof(SharedSlots::Ring) * locals * locals;
}

}  // namespace

// With two slots, a rank can put a piece while others still take the previous one.  With several hosts, more pieces are
// under way at the same time, each in a different stage.
SharedSlots::Shape::Shape(const Layout& layout)
    : slots(layout.hosts == 1 ? 2 : kMaxSlots),
      slot_size(std::max(size_of_slots(layout), layout.lanes * kLeastPart)) {}

int SharedSlots::offer(int locals, Shape shape) { return create_shared_file(memory_size(locals, shape)); }

std::shared_ptr<SharedSlots> SharedSlots::map(const ShmOffer& offer, int locals, Shape shape) {
  if (offer.descriptor < 0) return nullptr;
  const auto [memory, size] = open_shared_file(offer.pid, offer.descriptor);
  if (memory && size != memory_size(locals, shape)) {
    munmap(memory, size);
    return nullptr;
  }
  return memory ? std::shared_ptr<SharedSlots>(new SharedSlots(memory, locals, shape)) : nullptr;
}

SharedSlots::SharedSlots(char* memory, int locals, Shape shape)
    : memory_(memory),
      counters_(reinterpret_cast<Counters*>(memory)),  // initially zero, like all memory of a new file
      locals_(locals),
      shape_(shape) {}

SharedSlots::~SharedSlots() { munmap(memory_, memory_size(locals_, shape_)); }

void SharedSlots::introduce(int local) {
  counters_[local].pid = getpid();
  counters_[local].address = reinterpret_cast<uint64_t>(&counters_[local]);
}

bool SharedSlots::can_read_all() const {
  try {
    for (int local = 0; local < locals_; ++local) {
      uint64_t address = 0;
      const auto at = counters_[local].address + offsetof(Counters, address);
      read(local, reinterpret_cast<char*>(&address), at, sizeof(address));
      if (address != counters_[local].address) return false;
    }
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

void SharedSlots::read(int local, char* to, uint64_t address, size_t bytes) const {
  while (bytes > 0) {
    const iovec target{to, bytes}, source{reinterpret_cast<void*>(address), bytes};
    const ssize_t count = process_vm_readv(counters_[local].pid, &target, 1, &source, 1, 0);
    if (count <= 0) {
      throw std::runtime_error("this rank can't read the memory of process " + std::to_string(counters_[local].pid) +
                               ": " + std::strerror(errno));
    }
    to += count, address += count, bytes -= count;
  }
}

char* SharedSlots::slot(int local, uint64_t piece) const {
  return memory_ + slots_begin(locals_) + (local * shape_.slots + piece % shape_.slots) * shape_.slot_size;
}

size_t SharedSlots::give_back(int local) const {
  const size_t page = getpagesize();  // only whole pages: other ranks may use the rest of the pages at both ends
  const size_t slots = slot(local, 0) - memory_;
  const size_t begin = round_up(slots, page), end = (slots + shape_.slots * shape_.slot_size) / page * page;
  return begin < end && madvise(memory_ + begin, end - begin, MADV_REMOVE) == 0 ? end - begin : 0;
}

SharedSlots::Ring& SharedSlots::ring(int from, int to) const {
  return reinterpret_cast<Ring*>(memory_ + rings_begin(locals_, shape_))[from * locals_ + to];
}

}  // namespace cpulaunch
