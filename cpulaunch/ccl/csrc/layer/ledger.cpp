#include "ledger.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "forked.hpp"

namespace cpulaunch {

namespace ledger {

namespace {

std::atomic<File*> opened{nullptr};

// Null in a process that was forked from the rank: only the rank itself writes to the ledger.
File* file() { return is_forked() ? nullptr : opened.load(std::memory_order_relaxed); }

constexpr auto kRelaxed = std::memory_order_relaxed;

// Writes as much of a text as fits, and fills the rest with zeros.
template <size_t size>
void write(char (&field)[size], const char* text) {
  const auto length = strnlen(text, size);
  std::memcpy(field, text, length);
  std::memset(field + length, 0, size - length);
}

// The kernel's number of the calling thread; each thread asks the kernel only once.
uint32_t this_thread() {
  thread_local const auto number = static_cast<uint32_t>(syscall(SYS_gettid));
  return number;
}

// Counts a completed operation, and updates the longest time between two of them.
void progress(File& file, uint64_t time) {
  file.collectives.fetch_add(1, kRelaxed);
  const auto before = file.progressed_at.exchange(time, kRelaxed);
  if (before == 0 || before > time) return;
  auto longest = file.longest_gap.load(kRelaxed);
  while (longest < time - before && !file.longest_gap.compare_exchange_weak(longest, time - before, kRelaxed)) {
  }
}

void begin(File& file, uint64_t time, uint64_t bytes) {
  file.bytes.fetch_add(bytes, kRelaxed);
  if (file.under_way.fetch_add(1) == 0) file.busy_since.store(time);
}

// Reads `busy_since` before the decrement: while any operation is under way, no thread sets it.
void end(File& file, uint64_t time) {
  const auto since = file.busy_since.load();
  if (file.under_way.fetch_sub(1) == 1 && time > since) file.busy.fetch_add(time - since, kRelaxed);
}

}  // namespace

void open(void* mapping) {
  auto* file = static_cast<File*>(mapping);
  file->magic.store(kMagic, kRelaxed);
  opened.store(file, std::memory_order_release);
}

bool is_open() { return file() != nullptr; }

uint64_t now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
}

void add_waiting(uint64_t time) {
  if (auto* to = file()) to->waiting.fetch_add(time, kRelaxed);
}

}  // namespace ledger

using ledger::kRelaxed;

LedgerGroup::LedgerGroup(const std::string& backend, const std::string& name, int rank, int size,
                         const std::string& members) {
  auto* file = ledger::file();
  if (!file) return;
  for (const uint32_t usable : {ledger::Group::free, ledger::Group::closed}) {
    for (auto& group : file->groups) {
      auto state = usable;
      if (!group.state.compare_exchange_strong(state, ledger::Group::changing, std::memory_order_acquire)) continue;
      ledger::write(group.backend, backend.c_str());
      ledger::write(group.name, name.c_str());
      ledger::write(group.members, members.c_str());
      group.size = size;
      group.rank = rank;
      for (auto& operation : group.operations) operation.state.store(ledger::Operation::none, kRelaxed);
      group.count.store(0, kRelaxed);
      group.state.store(ledger::Group::open, std::memory_order_release);
      group_ = &group;
      return;
    }
  }
}

void LedgerGroup::close() {
  auto* group = group_.exchange(nullptr);
  if (group && !is_forked()) group->state.store(ledger::Group::closed, std::memory_order_release);
}

LedgerEntry::LedgerEntry(LedgerGroup& of, uint64_t sequence, const char* kind, const char* type, uint64_t bytes,
                         int peer, uint64_t enqueued_at)
    : enqueued_at_(enqueued_at) {
  auto* file = ledger::file();
  if (!file) return;
  ledger::begin(*file, enqueued_at, bytes);
  is_under_way_ = true;
  auto* group = of.group_.load(std::memory_order_acquire);
  if (!group) return;
  auto& record = group->operations[group->count.fetch_add(1, kRelaxed) % ledger::kOperations];
  // After the exchange, only this operation writes to the record, until it ends.
  auto state = record.state.load(kRelaxed);
  if (state == ledger::Operation::enqueued || state == ledger::Operation::started ||
      !record.state.compare_exchange_strong(state, ledger::Operation::enqueued, std::memory_order_acquire)) {
    return;
  }
  record.sequence = sequence;
  ledger::write(record.kind, kind);
  std::memcpy(record.type, type, sizeof(record.type));
  record.bytes = bytes;
  record.enqueued_at = enqueued_at;
  record.started_at = record.completed_at = 0;
  record.peer = peer;
  record.root = 0;
  record.reduction[0] = 0;
  record.thread = ledger::this_thread();
  for (auto& half : record.waits_for) half.store(0, kRelaxed);
  record_ = &record;
}

void LedgerEntry::says(int root, const char* reduction) {
  if (!record_) return;
  record_->root = root + 1;
  ledger::write(record_->reduction, reduction);
}

void LedgerEntry::start() {
  if (!record_) return;
  record_->started_at = enqueued_at_;
  record_->state.store(ledger::Operation::started, kRelaxed);
}

void LedgerEntry::waits_for(const std::string& ranks) {
  if (!record_ || ended_at()) return;
  static const std::string kMore = ", …";
  char text[sizeof(record_->waits_for)] = {};
  auto shown = ranks;
  if (shown.size() >= sizeof(text)) {
    shown = shown.substr(0, sizeof(text) - kMore.size());
    shown = shown.substr(0, shown.rfind(',')) + kMore;
  }
  std::memcpy(text, shown.data(), std::min(shown.size(), sizeof(text) - 1));
  for (size_t i = 0; i < 2; ++i) {
    uint64_t half;
    std::memcpy(&half, text + i * sizeof(half), sizeof(half));
    record_->waits_for[i].store(half, kRelaxed);
  }
}

void LedgerEntry::end(bool failed) {
  auto* file = ledger::file();
  if (!file || ended_at()) return;
  const auto time = ledger::now();
  if (is_under_way_.exchange(false)) ledger::end(*file, time);
  if (record_) {
    record_->completed_at = time;
    record_->state.store(failed ? ledger::Operation::failed : ledger::Operation::completed,
                         std::memory_order_release);
  }
  if (!failed) ledger::progress(*file, time);
  ended_at_.store(time, std::memory_order_release);
}

}  // namespace cpulaunch
