// This rank's ledger: a record of its latest operations, in a mapping that its agent can read even after the rank has
// died.  cpulaunch/ledger.py declares the same layout and documents the fields.
//
// Writing takes no system call and no lock.  Without a ledger, nothing is recorded.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace cpulaunch {

namespace ledger {

constexpr uint32_t kMagic = 0x4C505504;
constexpr size_t kSize = 3 << 15;
constexpr size_t kGroups = 32, kOperations = 16;

using Number = std::atomic<uint64_t>;
using State = std::atomic<uint32_t>;
static_assert(Number::is_always_lock_free && State::is_always_lock_free);

struct Operation {
  enum : uint32_t { none, enqueued, started, completed, failed };

  uint64_t sequence;
  State state;
  uint32_t root;  // plus 1; 0: none
  char kind[28];
  char type[12];
  uint64_t bytes;
  uint64_t enqueued_at, started_at, completed_at;
  int32_t peer;
  uint32_t thread;  // the kernel's number of the calling thread
  std::atomic<uint64_t> waits_for[2];  // text: ranks of the group
  char reduction[16];
};
static_assert(sizeof(Operation) == 128 && offsetof(Operation, type) == 44 && offsetof(Operation, bytes) == 56 &&
              offsetof(Operation, peer) == 88 && offsetof(Operation, waits_for) == 96 &&
              offsetof(Operation, reduction) == 112);

struct Group {
  enum : uint32_t { free, open, closed, changing };

  State state;
  char backend[12];
  char name[48];
  uint32_t size, rank;
  Number count;
  char members[48];  // the members' ranks in the job; zeros if unknown
  Operation operations[kOperations];
};
static_assert(offsetof(Group, size) == 64 && offsetof(Group, count) == 72 && offsetof(Group, members) == 80 &&
              offsetof(Group, operations) == 128);

struct File {
  State magic, flags;
  Number steps, collectives, progressed_at, longest_gap, waiting;
  // About operations: how many are under way; since when at least one has been; the total time before that in which at
  // least one was; and the bytes of all operations so far.
  Number under_way, busy_since, busy, bytes;
  char padding[48];
  Group groups[kGroups];
};
static_assert(offsetof(File, steps) == 8 && offsetof(File, waiting) == 40 && offsetof(File, under_way) == 48 &&
              offsetof(File, groups) == 128);
static_assert(sizeof(File) <= kSize);

// Starts writing to this mapping of kSize bytes, which must exist until the process ends.
void open(void* mapping);

bool is_open();

// The monotonic clock in nanoseconds, which all times of a ledger use.
uint64_t now();

// Adds to the total time that threads have waited for collectives, in nanoseconds.
void add_waiting(uint64_t time);

}  // namespace ledger

// A process group's part of the ledger.  If no part is free, the group's operations are not recorded.
class LedgerGroup {
 public:
  LedgerGroup(const std::string& backend, const std::string& name, int rank, int size, const std::string& members);
  ~LedgerGroup() { close(); }
  LedgerGroup(const LedgerGroup&) = delete;
  LedgerGroup& operator=(const LedgerGroup&) = delete;

  // Frees the part for other groups.
  void close();

 private:
  friend class LedgerEntry;
  std::atomic<ledger::Group*> group_{nullptr};
};

// One collective or message.  Records are reused in turn, except those of operations under way, because they show where
// a rank hangs.  An operation whose turn falls on such a record isn't recorded.
class LedgerEntry {
 public:
  // `type` must have as many bytes as the field.
  LedgerEntry(LedgerGroup& group, uint64_t sequence, const char* kind, const char* type, uint64_t bytes, int peer,
              uint64_t enqueued_at);
  // An operation that was never ended counts as failed.
  ~LedgerEntry() { end(/*failed=*/true); }
  LedgerEntry(const LedgerEntry&) = delete;
  LedgerEntry& operator=(const LedgerEntry&) = delete;

  // Records the root (a rank of the group, or -1) and the name of the reduction ("" if there is none).
  void says(int root, const char* reduction);
  // Uses the time of the call as the start, to save reading the clock.  Between the two, at most a copy was made of
  // tensors that can't be sent in place.
  void start();
  // `ranks` are ranks of the group, such as "1, 3".
  void waits_for(const std::string& ranks);
  // Only the first call has an effect.
  void end(bool failed);
  // 0 until end() is called.
  uint64_t ended_at() const { return ended_at_.load(std::memory_order_acquire); }
  uint64_t enqueued_at() const { return enqueued_at_; }

 private:
  ledger::Operation* record_ = nullptr;
  const uint64_t enqueued_at_;
  std::atomic<bool> is_under_way_{false};  // it is counted in File::under_way
  std::atomic<uint64_t> ended_at_{0};
};

}  // namespace cpulaunch
