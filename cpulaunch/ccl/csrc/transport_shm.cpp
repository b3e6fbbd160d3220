#include "transport_shm.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace cpulaunch {

namespace {

// A piece has so many bytes for each rank to sum, and at most so many in all: enough that a step costs more than the
// wait for it, and few enough that two slots, of which one is filled while the other is read, stay in a core's cache
// beside the tensor.  Both are measured.
constexpr size_t kPartSize = 64 << 10, kMaxPieceSize = 256 << 10;
// Up to so many bytes of all ranks together, each rank reads all of them rather than wait for the others twice.
constexpr size_t kMaxWholeSize = 64 << 10;
constexpr size_t kLine = 64, kBlock = 4 * kLine;  // bytes: a vector register of AVX-512, and what a loop sums at once
constexpr size_t kPage = 4096;                    // bytes

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

size_t piece_size_for(int size) { return std::min(size * kPartSize, kMaxPieceSize); }

// False where the user names an algorithm of oneCCL's, or has several of its workers share the work.
bool user_leaves_choice() {
  const char* workers = std::getenv("CCL_WORKER_COUNT");
  return !std::getenv("CCL_ALLREDUCE") && (!workers || std::string(workers) == "1");
}

int open_memory(const ShmOffer& offer) {
  if (offer.pid == getpid()) return dup(offer.descriptor);
  const auto path = "/proc/" + std::to_string(offer.pid) + "/fd/" + std::to_string(offer.descriptor);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);  // fails where rank 0 is another user's, for example
}

#define CPULAUNCH_INLINE inline __attribute__((always_inline))

// Vectors that compilers translate for whichever instruction set.
typedef float Floats __attribute__((vector_size(kLine)));
typedef double Doubles __attribute__((vector_size(kLine)));
typedef uint32_t Words __attribute__((vector_size(kLine)));

// The sum of lines, whose numbers are summed as they are.
template <class Line>
struct Plain {
  CPULAUNCH_INLINE void start(const char* from) { std::memcpy(&sum, from, kLine); }
  CPULAUNCH_INLINE void add(const char* from) {
    Line line;
    std::memcpy(&line, from, kLine);
    sum += line;
  }
  CPULAUNCH_INLINE void store(char* to) const { std::memcpy(to, &sum, kLine); }

  Line sum;
};

// bfloat16 is the upper half of a float.  A word holds two; summed apart, they need not change places, which
// would cost more than the sum.
struct Halves {
  static constexpr uint32_t kUpper = 0xffff0000;

  CPULAUNCH_INLINE void start(const char* from) {
    lower = upper = -Floats{};  // -0, to which -0 may be added
    add(from);
  }
  CPULAUNCH_INLINE void add(const char* from) {
    Words words;
    std::memcpy(&words, from, kLine);
    lower += reinterpret_cast<Floats>(words << 16);
    upper += reinterpret_cast<Floats>(words & kUpper);
  }
  CPULAUNCH_INLINE void store(char* to) const {
    Words low, high;
    round(low, lower);
    round(high, upper);
    low = low >> 16 | (high & kUpper);
    std::memcpy(to, &low, kLine);
  }
  // To the nearest bfloat16, of two to the even one; NaN stays NaN.
  static CPULAUNCH_INLINE void round(Words& rounded, const Floats& value) {
    const auto word = reinterpret_cast<Words>(value);
    rounded = value == value ? word + 0x7fff + (word >> 16 & 1) : Words{} + 0x7fc00000;
  }

  Floats lower, upper;
};

// Sums `bytes`, which are whole blocks; `from` has each rank's.
template <class Sum>
CPULAUNCH_INLINE void sum_blocks(char* to, const std::vector<const char*>& from, size_t bytes) {
  constexpr size_t kLines = kBlock / kLine;
  Sum sums[kLines];
  for (size_t at = 0; at < bytes; at += kBlock) {
    for (size_t i = 0; i < kLines; ++i) sums[i].start(from[0] + at + i * kLine);
    for (size_t rank = 1; rank < from.size(); ++rank) {
      for (size_t i = 0; i < kLines; ++i) sums[i].add(from[rank] + at + i * kLine);
    }
    for (size_t i = 0; i < kLines; ++i) sums[i].store(to + at + i * kLine);
  }
}

// The module may run on another kind of machine than it was built on.
#define CPULAUNCH_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))

CPULAUNCH_CLONES void sum_float(char* to, const std::vector<const char*>& from, size_t bytes) {
  sum_blocks<Plain<Floats>>(to, from, bytes);
}

CPULAUNCH_CLONES void sum_double(char* to, const std::vector<const char*>& from, size_t bytes) {
  sum_blocks<Plain<Doubles>>(to, from, bytes);
}

CPULAUNCH_CLONES void sum_bfloat16(char* to, const std::vector<const char*>& from, size_t bytes) {
  sum_blocks<Halves>(to, from, bytes);
}

}  // namespace

struct ShmAllreduce::Format {
  size_t bytes;
  void (*sum)(char* to, const std::vector<const char*>& from, size_t bytes);
};

const ShmAllreduce::Format* ShmAllreduce::format_of(c10::ScalarType type) {
  static constexpr Format kFloat{4, sum_float}, kDouble{8, sum_double}, kBFloat16{2, sum_bfloat16};
  switch (type) {
    case c10::ScalarType::Float:
    case c10::ScalarType::ComplexFloat: return &kFloat;
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexDouble: return &kDouble;
    case c10::ScalarType::BFloat16: return &kBFloat16;
    default: return nullptr;
  }
}

class ShmAllreduce::Sum final : public Transfer {
 public:
  Sum(std::shared_ptr<ShmAllreduce> allreduce, uint64_t end) : allreduce_(std::move(allreduce)), end_(end) {}

  bool test() override { return allreduce_->advance(end_); }
  void abort() override { allreduce_->abort(); }
  std::string stragglers() override { return allreduce_->stragglers(); }
  uint64_t steps() const override { return allreduce_->steps_.load(std::memory_order_relaxed); }

 private:
  const std::shared_ptr<ShmAllreduce> allreduce_;
  const uint64_t end_;  // the number of the piece after the tensor's last one
};

bool ShmAllreduce::takes(c10::ScalarType type, const c10d::ReduceOp& op) {
  using c10d::ReduceOp;
  return format_of(type) && (op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM);
}

size_t ShmAllreduce::memory_size(int size) {
  return round_up(size * sizeof(Counters), kPage) + size * kSlots * piece_size_for(size);
}

int ShmAllreduce::offer(int size) {
  if (size == 1 || !user_leaves_choice()) return -1;
  const int descriptor = static_cast<int>(syscall(SYS_memfd_create, "cpulaunch-ccl", 1u /* MFD_CLOEXEC */));
  if (descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(memory_size(size))) != 0) {
    close(descriptor);
    return -1;
  }
  return descriptor;
}

std::shared_ptr<ShmAllreduce> ShmAllreduce::join(const ShmOffer& offer, int rank, int size, bool one_host) {
  if (offer.descriptor < 0 || !one_host || !user_leaves_choice()) return nullptr;
  const int descriptor = open_memory(offer);
  if (descriptor < 0) return nullptr;
  void* memory = mmap(nullptr, memory_size(size), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (memory == MAP_FAILED) return nullptr;
  return std::shared_ptr<ShmAllreduce>(new ShmAllreduce(memory, rank, size));
}

ShmAllreduce::ShmAllreduce(void* memory, int rank, int size)
    : rank_(rank),
      size_(size),
      piece_size_(piece_size_for(size)),
      memory_(static_cast<char*>(memory)),
      counters_(static_cast<Counters*>(memory)) {}  // zeroes at first, as all memory of a new file

ShmAllreduce::~ShmAllreduce() { munmap(memory_, memory_size(size_)); }

std::unique_ptr<Transfer> ShmAllreduce::start(void* data, size_t count, c10::ScalarType type) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto* format = format_of(type);
  const size_t total = count * (c10::isComplexType(type) ? 2 : 1) * format->bytes;
  for (size_t begin = 0; begin < total; begin += piece_size_) {
    pieces_.push_back({static_cast<char*>(data) + begin, std::min(piece_size_, total - begin), total - begin, format});
    ++added_;
  }
  return std::make_unique<Sum>(shared_from_this(), added_);
}

bool ShmAllreduce::advance(uint64_t end) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Many small pieces at a time, but only one large one, so that a waiting caller can look at the clock.
  for (size_t moved = 0; collected_ < end && !aborted_ && moved < piece_size_;) {
    const size_t step = this->step();
    if (step == 0) break;
    moved += step;
    steps_.fetch_add(1, std::memory_order_relaxed);
  }
  return collected_ >= end;
}

// The other ranks then find this rank before its first piece and go no further.  A rank that has read the counters
// earlier may go on with this rank's slots: they stay as they are, because nothing is put any more.  The stores have
// the default order, which is stronger than they need: they order nothing, and this is no hot path.
void ShmAllreduce::abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  for (const auto stage : {&Counters::put, &Counters::summed}) (counters_[rank_].*stage).store(0);
}

// The last stage first, which frees slots.
size_t ShmAllreduce::step() {
  if (collected_ < summed_ && (is_whole(piece(collected_)) || others_passed(&Counters::summed, collected_))) {
    return collect(collected_);
  }
  if (summed_ < put_ && others_passed(&Counters::put, summed_)) {
    check_alike(summed_);
    return sum(summed_);
  }
  if (put_ < added_ && (put_ < kSlots || is_free(put_ - kSlots))) {
    return put(put_);
  }
  return 0;
}

// Ranks that call something else, or with other tensors, would sum what lies in the slots by chance.
void ShmAllreduce::check_alike(uint64_t number) const {
  const auto mine = piece(number).signature();
  for (int rank = 0; rank < size_; ++rank) {
    const auto theirs = counters_[rank].signatures[number % kSlots];
    if (theirs != mine) {
      throw std::runtime_error("rank " + std::to_string(rank) + " of the group reduces a tensor of another size or " +
                               "type: " + shown(theirs) + ", here " + shown(mine));
    }
  }
}

size_t ShmAllreduce::Piece::signature() const { return left << 8 | format->bytes; }

std::string ShmAllreduce::shown(size_t signature) {
  const size_t bytes = signature & 0xff;
  return std::to_string((signature >> 8) / bytes) + " numbers of " + std::to_string(8 * bytes) + " bits";
}

std::string ShmAllreduce::stragglers() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string ranks;  // that have put less than this one
  for (int rank = 0; rank < size_; ++rank) {
    if (counters_[rank].put.load(std::memory_order_relaxed) >= put_) continue;  // nothing is read on its account
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return ranks;
}

size_t ShmAllreduce::put(uint64_t number) {
  const auto& from = piece(number);
  const auto own = is_whole(from) ? Range{0, 0} : part(from, rank_);  // nobody reads that from the slot
  char* to = slot(rank_, number);
  std::memcpy(to, from.data, own.begin);
  std::memcpy(to + own.end, from.data + own.end, from.bytes - own.end);
  counters_[rank_].signatures[number % kSlots] = from.signature();
  // Release: a rank that sees the piece put sees what is in the slot, too, and its signature.
  counters_[rank_].put.store(++put_, std::memory_order_release);
  return from.bytes;
}

size_t ShmAllreduce::sum(uint64_t number) {
  const auto& to = piece(number);
  const auto [begin, end] = is_whole(to) ? Range{0, to.bytes} : part(to, rank_);
  std::vector<const char*> from;
  for (int rank = 0; rank < size_; ++rank) from.push_back((rank == rank_ ? to.data : slot(rank, number)) + begin);
  const size_t blocks = (end - begin) / kBlock * kBlock;
  to.format->sum(to.data + begin, from, blocks);
  if (const size_t rest = end - begin - blocks) {
    char own[kBlock] = {};  // slots have room up to the block's end, tensors have not
    for (auto& source : from) source += blocks;
    std::memcpy(own, from[rank_], rest);
    from[rank_] = own;
    to.format->sum(own, from, kBlock);
    std::memcpy(to.data + begin + blocks, own, rest);
  }
  for (int rank = 0; rank < size_ && !is_whole(to); ++rank) {
    if (rank != rank_) std::memcpy(slot(rank, number) + begin, to.data + begin, end - begin);
  }
  // Release: a rank that sees the piece summed sees this rank's sum in its slot, too.  This rank's reads of that slot
  // are over, so that it may be overwritten.
  counters_[rank_].summed.store(++summed_, std::memory_order_release);
  return to.bytes;
}

size_t ShmAllreduce::collect(uint64_t number) {
  const auto to = piece(number);
  if (!is_whole(to)) {
    const auto own = part(to, rank_);
    const char* from = slot(rank_, number);
    std::memcpy(to.data, from, own.begin);
    std::memcpy(to.data + own.end, from + own.end, to.bytes - own.end);
  }
  pieces_.pop_front();
  ++collected_;
  return to.bytes;
}

char* ShmAllreduce::slot(int rank, uint64_t number) const {
  return memory_ + round_up(size_ * sizeof(Counters), kPage) + (rank * kSlots + number % kSlots) * piece_size_;
}

bool ShmAllreduce::is_whole(const Piece& piece) const { return piece.bytes * size_ <= kMaxWholeSize; }

ShmAllreduce::Range ShmAllreduce::part(const Piece& piece, int rank) const {
  const size_t length = round_up((piece.bytes + size_ - 1) / size_, kBlock);
  return {std::min(piece.bytes, rank * length), std::min(piece.bytes, (rank + 1) * length)};
}

bool ShmAllreduce::is_free(uint64_t number) const {
  return number < collected_ && others_passed(&Counters::summed, number);
}

bool ShmAllreduce::others_passed(Stage stage, uint64_t number) const {
  for (int rank = 0; rank < size_; ++rank) {
    // Acquire: what this rank reads or overwrites next comes after what that rank did before it stored the counter.
    if (rank != rank_ && (counters_[rank].*stage).load(std::memory_order_acquire) <= number) return false;
  }
  return true;
}

}  // namespace cpulaunch
