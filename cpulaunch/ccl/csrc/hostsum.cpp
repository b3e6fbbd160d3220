#include "hostsum.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace cpulaunch {

namespace {

// Two slots of this many bytes for each rank: one is filled while the other is read, and both fit into a
// core's cache.  Measured with 32 KB to 1 MB and 2 to 8 slots.
constexpr size_t kPiece = 256 << 10;
// Up to here, reading all that the others have costs less than waiting for them twice.
constexpr size_t kWhole = 64 << 10;
constexpr size_t kLine = 64, kPage = 4096;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// As c10::BFloat16, rounded to nearest even, but without branches, so that compilers make vectors of it.
struct BFloat16 {
  explicit BFloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    const uint32_t rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0);
  }
  explicit operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }
  uint16_t bits;
};

// One source, several instruction sets: the module may have been built on another kind of machine.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define CPULAUNCH_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CPULAUNCH_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

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
  sum_as<BFloat16, float>(to, from, count);
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

int HostSum::make_memory(int size) {
  const int descriptor = static_cast<int>(syscall(SYS_memfd_create, "cpulaunch-ccl", 1u /* MFD_CLOEXEC */));
  if (descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(bytes(size))) != 0) {
    close(descriptor);
    return -1;
  }
  return descriptor;
}

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
    pieces_.push_back({static_cast<char*>(data) + begin, std::min(kPiece, total - begin), total - begin, kind});
    ++added_;
  }
  return added_;
}

bool HostSum::advance(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Small pieces many at a time; who waits is to look at the clock between large ones.
  for (size_t moved = 0; collected_ < ticket && !withdrawn_ && moved < kPiece;) {
    const size_t step = this->step();
    if (step == 0) break;
    moved += step;
    steps_.fetch_add(1, std::memory_order_relaxed);
  }
  return collected_ >= ticket;
}

void HostSum::withdraw() {
  std::lock_guard<std::mutex> lock(mutex_);
  withdrawn_ = true;
  for (const auto stage : {&Progress::put, &Progress::summed, &Progress::collected}) (progress_[rank_].*stage).store(0);
}

// The last stage first, which frees slots.
size_t HostSum::step() {
  if (collected_ < summed_ && (is_whole(piece(collected_)) || others_passed(&Progress::summed, collected_))) {
    return collect(collected_);
  }
  if (summed_ < put_ && others_passed(&Progress::put, summed_)) {
    check_alike(summed_);
    return sum(summed_);
  }
  if (put_ < added_ && (put_ < kSlots || others_passed(&Progress::collected, put_ - kSlots))) {
    return put(put_);
  }
  return 0;
}

// Ranks that call something else, or with other tensors, would sum what lies in the slots by chance.
void HostSum::check_alike(uint64_t number) const {
  const auto mine = piece(number).signature();
  for (int rank = 0; rank < size_; ++rank) {
    if (progress_[rank].signatures[number % kSlots] != mine) {
      throw std::runtime_error("rank " + std::to_string(rank) + " of the group reduces a tensor of another size or type");
    }
  }
}

size_t HostSum::Piece::signature() const { return left << 8 | kind->bytes; }

size_t HostSum::put(uint64_t number) {
  const auto& from = piece(number);
  const auto own = is_whole(from) ? Range{0, 0} : part(from, rank_);  // nobody reads that
  char* to = slot(rank_, number);
  std::memcpy(to, from.data, own.begin);
  std::memcpy(to + own.end, from.data + own.end, from.bytes - own.end);
  progress_[rank_].signatures[number % kSlots] = from.signature();
  progress_[rank_].put.store(++put_, std::memory_order_release);
  return from.bytes;
}

size_t HostSum::sum(uint64_t number) {
  const auto& to = piece(number);
  const auto [begin, end] = is_whole(to) ? Range{0, to.bytes} : part(to, rank_);
  std::vector<const char*> from;
  for (int rank = 0; rank < size_; ++rank) from.push_back((rank == rank_ ? to.data : slot(rank, number)) + begin);
  to.kind->sum(to.data + begin, from, (end - begin) / to.kind->bytes);
  if (!is_whole(to)) std::memcpy(slot(rank_, number) + begin, to.data + begin, end - begin);
  progress_[rank_].summed.store(++summed_, std::memory_order_release);
  return to.bytes;
}

size_t HostSum::collect(uint64_t number) {
  const auto to = piece(number);
  for (int rank = 0; rank < size_ && !is_whole(to); ++rank) {
    if (rank == rank_) continue;
    const auto [begin, end] = part(to, rank);
    std::memcpy(to.data + begin, slot(rank, number) + begin, end - begin);
  }
  pieces_.pop_front();
  progress_[rank_].collected.store(++collected_, std::memory_order_release);
  return to.bytes;
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
