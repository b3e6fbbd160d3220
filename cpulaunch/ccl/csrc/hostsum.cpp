#include "hostsum.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include <c10/util/BFloat16.h>

namespace cpulaunch {

namespace {

// Two slots of this many bytes for each rank: one is filled while the other is read, and both fit into a
// core's cache.  Measured with 32 KB to 1 MB and 2 to 8 slots.
constexpr size_t kPiece = 256 << 10;
constexpr uint64_t kSlots = 2;
// Up to here, reading all that the others have costs less than waiting for them twice.
constexpr size_t kWhole = 64 << 10;
constexpr size_t kLine = 64, kPage = 4096;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// One source, several instruction sets: the module may have been built on another kind of machine.
#define CPULAUNCH_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))

template <class T, class Wide>
inline __attribute__((always_inline)) void sum_as(void* to, const std::vector<const char*>& from, size_t count) {
  if (from.size() == 2) {
    const T *a = reinterpret_cast<const T*>(from[0]), *b = reinterpret_cast<const T*>(from[1]);
    T* out = static_cast<T*>(to);
    for (size_t i = 0; i < count; ++i) out[i] = static_cast<T>(static_cast<Wide>(a[i]) + static_cast<Wide>(b[i]));
    return;
  }
  constexpr size_t kBlock = 1024;
  Wide sums[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t length = std::min(kBlock, count - start);
    const T* first = reinterpret_cast<const T*>(from[0]) + start;
    for (size_t i = 0; i < length; ++i) sums[i] = static_cast<Wide>(first[i]);
    for (size_t rank = 1; rank < from.size(); ++rank) {
      const T* next = reinterpret_cast<const T*>(from[rank]) + start;
      for (size_t i = 0; i < length; ++i) sums[i] += static_cast<Wide>(next[i]);
    }
    T* out = static_cast<T*>(to) + start;
    for (size_t i = 0; i < length; ++i) out[i] = static_cast<T>(sums[i]);
  }
}

CPULAUNCH_CLONES void sum_float(void* to, const std::vector<const char*>& from, size_t count) {
  sum_as<float, float>(to, from, count);
}

CPULAUNCH_CLONES void sum_double(void* to, const std::vector<const char*>& from, size_t count) {
  sum_as<double, double>(to, from, count);
}

CPULAUNCH_CLONES void sum_bfloat16(void* to, const std::vector<const char*>& from, size_t count) {
  sum_as<c10::BFloat16, float>(to, from, count);
}

}  // namespace

struct HostSum::Kind {
  size_t bytes;
  void (*sum)(void* to, const std::vector<const char*>& from, size_t count);
};

const HostSum::Kind* HostSum::kind_of(ccl::datatype type) {
  static constexpr Kind kFloat{4, sum_float}, kDouble{8, sum_double}, kBFloat16{2, sum_bfloat16};
  switch (type) {
    case ccl::datatype::float32: return &kFloat;
    case ccl::datatype::float64: return &kDouble;
    case ccl::datatype::bfloat16: return &kBFloat16;
    default: return nullptr;
  }
}

size_t HostSum::bytes(int size) { return round_up(size * sizeof(Progress), kPage) + size * kSlots * kPiece; }

bool HostSum::takes(ccl::datatype type, ccl::reduction reduction) {
  return reduction == ccl::reduction::sum && kind_of(type);
}

HostSum::HostSum(int descriptor, int rank, int size) : rank_(rank), size_(size) {
  void* memory = mmap(nullptr, bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  memory_ = static_cast<char*>(memory);
  progress_ = static_cast<Progress*>(memory);
}

HostSum::~HostSum() { munmap(memory_, bytes(size_)); }

uint64_t HostSum::add(void* data, size_t count, ccl::datatype type) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto* kind = kind_of(type);
  const size_t total = count * kind->bytes;
  for (size_t begin = 0; begin < total; begin += kPiece) {
    pieces_.push_back({static_cast<char*>(data) + begin, std::min(kPiece, total - begin), kind});
    ++added_;
  }
  return added_;
}

bool HostSum::advance(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (collected_ < ticket && !withdrawn_) step();
  return collected_ >= ticket;
}

void HostSum::withdraw() {
  std::lock_guard<std::mutex> lock(mutex_);
  withdrawn_ = true;
  for (const auto stage : {&Progress::put, &Progress::summed, &Progress::collected}) (progress_[rank_].*stage).store(0);
}

// One at a time, so that who waits can look at the clock in between; the last stage first, which frees slots.
void HostSum::step() {
  if (collected_ < summed_ && (is_whole(piece(collected_)) || others_passed(&Progress::summed, collected_))) {
    collect(collected_);
  } else if (summed_ < put_ && others_passed(&Progress::put, summed_)) {
    sum(summed_);
  } else if (put_ < added_ && (put_ < kSlots || others_passed(&Progress::collected, put_ - kSlots))) {
    put(put_);
  } else {
    return;
  }
  steps_.fetch_add(1, std::memory_order_relaxed);
}

void HostSum::put(uint64_t number) {
  const auto& from = piece(number);
  const auto own = is_whole(from) ? Range{0, 0} : part(from, rank_);  // nobody reads that
  char* to = slot(rank_, number);
  std::memcpy(to, from.data, own.begin);
  std::memcpy(to + own.end, from.data + own.end, from.bytes - own.end);
  progress_[rank_].put.store(++put_, std::memory_order_release);
}

void HostSum::sum(uint64_t number) {
  const auto& to = piece(number);
  const auto [begin, end] = is_whole(to) ? Range{0, to.bytes} : part(to, rank_);
  std::vector<const char*> from;
  for (int rank = 0; rank < size_; ++rank) from.push_back((rank == rank_ ? to.data : slot(rank, number)) + begin);
  to.kind->sum(to.data + begin, from, (end - begin) / to.kind->bytes);
  if (!is_whole(to)) std::memcpy(slot(rank_, number) + begin, to.data + begin, end - begin);
  progress_[rank_].summed.store(++summed_, std::memory_order_release);
}

void HostSum::collect(uint64_t number) {
  const auto& to = piece(number);
  for (int rank = 0; rank < size_ && !is_whole(to); ++rank) {
    if (rank == rank_) continue;
    const auto [begin, end] = part(to, rank);
    std::memcpy(to.data + begin, slot(rank, number) + begin, end - begin);
  }
  pieces_.pop_front();
  progress_[rank_].collected.store(++collected_, std::memory_order_release);
}

char* HostSum::slot(int rank, uint64_t number) const {
  return memory_ + round_up(size_ * sizeof(Progress), kPage) + (rank * kSlots + number % kSlots) * kPiece;
}

bool HostSum::is_whole(const Piece& piece) const { return size_ == 2 || piece.bytes * size_ <= kWhole; }

HostSum::Range HostSum::part(const Piece& piece, int rank) const {
  const size_t length = round_up((piece.bytes + size_ - 1) / size_, kLine);
  return {std::min(piece.bytes, rank * length), std::min(piece.bytes, (rank + 1) * length)};
}

bool HostSum::others_passed(Stage stage, uint64_t number) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && (progress_[rank].*stage).load(std::memory_order_acquire) <= number) return false;
  }
  return true;
}

}  // namespace cpulaunch
