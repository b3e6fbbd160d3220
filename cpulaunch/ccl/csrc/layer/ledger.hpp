// This rank's ledger: what it has done last, in a mapping that its agent reads even once the rank is dead.
// cpulaunch/ledger.py has the same layout and says what the fields mean.
//
// Writing takes no system call and no lock.  Where there is no ledger nothing is written.

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
  uint32_t root;  // + 1; 0 where it isn't said
  char kind[28];
  char type[12];
  uint64_t bytes;
  uint64_t enqueued_at, started_at, completed_at;
  int32_t peer;
  uint32_t thread;  // that has called it
  std::atomic<uint64_t> waits_for[2];  // a text
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
  char members[48];  // the ranks of the job that they are; zeros where nobody says that
  Operation operations[kOperations];
};
static_assert(offsetof(Group, size) == 64 && offsetof(Group, count) == 72 && offsetof(Group, members) == 80 &&
              offsetof(Group, operations) == 128);

struct File {
  State magic, flags;
  Number steps, collectives, progressed_at, longest_gap, waiting;
  // How many are under way, since when any was, how long any was before that, and the bytes of all.
  Number under_way, busy_since, busy, bytes;
  char padding[48];
  Group groups[kGroups];
};
static_assert(offsetof(File, steps) == 8 && offsetof(File, waiting) == 40 && offsetof(File, under_way) == 48 &&
              offsetof(File, groups) == 128);
static_assert(sizeof(File) <= kSize);

// Begins to write to this mapping of kSize bytes, which stays for as long as the process.
void open(void* mapping);

bool is_open();

// The monotonic clock in nanoseconds, as all times of a ledger.
uint64_t now();

// Adds to the time for which threads have waited for collectives.
void add_waiting(uint64_t time);

}  // namespace ledger

// The part of the ledger that a process group has; nothing where no part is free.
class LedgerGroup {
 public:
  LedgerGroup(const std::string& backend, const std::string& name, int rank, int size, const std::string& members);
  ~LedgerGroup() { close(); }
  LedgerGroup(const LedgerGroup&) = delete;
  LedgerGroup& operator=(const LedgerGroup&) = delete;

  // Makes room for another group.
  void close();

 private:
  friend class LedgerEntry;
  std::atomic<ledger::Group*> group_{nullptr};
};

// One collective or message.  It isn't in the ledger where its record is taken by one that is still under way: those
// are what a rank hangs in.
class LedgerEntry {
 public:
  // `type` has the size of the field.
  LedgerEntry(LedgerGroup& group, uint64_t sequence, const char* kind, const char* type, uint64_t bytes, int peer,
              uint64_t enqueued_at);
  // What was never brought to an end counts as failed.
  ~LedgerEntry() { end(/*failed=*/true); }
  LedgerEntry(const LedgerEntry&) = delete;
  LedgerEntry& operator=(const LedgerEntry&) = delete;

  // The rank of the group that others send to or receive from, or -1, and how what they send is reduced, if it is.
  void says(int root, const char* reduction);
  // No time is taken for it: between the call and this lies no more than the copying of what can't be sent as it is.
  void start();
  // `ranks` are those of the group, such as "1, 3".
  void waits_for(const std::string& ranks);
  // Only the first call counts.
  void end(bool failed);
  // When it was ended, if it was.
  uint64_t ended_at() const { return ended_at_.load(std::memory_order_acquire); }
  uint64_t enqueued_at() const { return enqueued_at_; }

 private:
  ledger::Operation* record_ = nullptr;
  const uint64_t enqueued_at_;
  std::atomic<bool> is_under_way_{false};  // and counted as such
  std::atomic<uint64_t> ended_at_{0};
};

}  // namespace cpulaunch
