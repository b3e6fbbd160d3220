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

// How many bytes a piece has: some for each rank to sum, and few enough that two slots, of which one is filled while
// the other is read, stay in a core's cache beside the tensor.
constexpr size_t kPart = 64 << 10, kMostOfAPiece = 256 << 10;
// Up to so many bytes of all ranks together, each reads all of them rather than to wait for the others twice.
constexpr size_t kWhole = 64 << 10;
constexpr size_t kLine = 64, kBlock = 4 * kLine, kPage = 4096;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

size_t piece_of(int size) { return std::min(size * kPart, kMostOfAPiece); }

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

// Sums `bytes`, whole blocks, of which each rank's are in `from`.
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

struct HostSum::Kind {
  size_t bytes;
  void (*sum)(char* to, const std::vector<const char*>& from, size_t bytes);
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

size_t HostSum::bytes(int size) { return round_up(size * sizeof(Progress), kPage) + size * kSlots * piece_of(size); }

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

HostSum::HostSum(int descriptor, int rank, int size) : rank_(rank), size_(size), piece_(piece_of(size)) {
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
  for (size_t begin = 0; begin < total; begin += piece_) {
    pieces_.push_back({static_cast<char*>(data) + begin, std::min(piece_, total - begin), total - begin, kind});
    ++added_;
  }
  return added_;
}

bool HostSum::advance(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Small pieces many at a time; who waits is to look at the clock between large ones.
  for (size_t moved = 0; collected_ < ticket && !withdrawn_ && moved < piece_;) {
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
  for (const auto stage : {&Progress::put, &Progress::summed}) (progress_[rank_].*stage).store(0);
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
  if (put_ < added_ && (put_ < kSlots || is_free(put_ - kSlots))) {
    return put(put_);
  }
  return 0;
}

// Ranks that call something else, or with other tensors, would sum what lies in the slots by chance.
void HostSum::check_alike(uint64_t number) const {
  const auto mine = piece(number).signature();
  for (int rank = 0; rank < size_; ++rank) {
    const auto theirs = progress_[rank].signatures[number % kSlots];
    if (theirs != mine) {
      throw std::runtime_error("rank " + std::to_string(rank) + " of the group reduces a tensor of another size or type: " +
                               shown(theirs) + ", here " + shown(mine));
    }
  }
}

size_t HostSum::Piece::signature() const { return left << 8 | kind->bytes; }

std::string HostSum::shown(size_t signature) {
  const size_t bytes = signature & 0xff;
  return std::to_string((signature >> 8) / bytes) + " numbers of " + std::to_string(8 * bytes) + " bits";
}

std::string HostSum::late() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (progress_[rank].put.load(std::memory_order_relaxed) >= put_) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return ranks;
}

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
  const size_t blocks = (end - begin) / kBlock * kBlock;
  to.kind->sum(to.data + begin, from, blocks);
  if (const size_t rest = end - begin - blocks) {
    char own[kBlock] = {};  // slots have room up to the block's end, tensors have not
    for (auto& source : from) source += blocks;
    std::memcpy(own, from[rank_], rest);
    from[rank_] = own;
    to.kind->sum(own, from, kBlock);
    std::memcpy(to.data + begin + blocks, own, rest);
  }
  for (int rank = 0; rank < size_ && !is_whole(to); ++rank) {
    if (rank != rank_) std::memcpy(slot(rank, number) + begin, to.data + begin, end - begin);
  }
  progress_[rank_].summed.store(++summed_, std::memory_order_release);
  return to.bytes;
}

size_t HostSum::collect(uint64_t number) {
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

char* HostSum::slot(int rank, uint64_t number) const {
  return memory_ + round_up(size_ * sizeof(Progress), kPage) + (rank * kSlots + number % kSlots) * piece_;
}

bool HostSum::is_whole(const Piece& piece) const { return piece.bytes * size_ <= kWhole; }

HostSum::Range HostSum::part(const Piece& piece, int rank) const {
  const size_t length = round_up((piece.bytes + size_ - 1) / size_, kBlock);
  return {std::min(piece.bytes, rank * length), std::min(piece.bytes, (rank + 1) * length)};
}

bool HostSum::is_free(uint64_t number) const {
  return number < collected_ && others_passed(&Progress::summed, number);
}

bool HostSum::others_passed(Stage stage, uint64_t number) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && (progress_[rank].*stage).load(std::memory_order_acquire) <= number) return false;
  }
  return true;
}

}  // namespace cpulaunch
