// Sums tensors among the ranks of one host, through memory that they share.
//
// oneCCL has large messages copied from process to process by the kernel, whole, so that each byte passes
// through main memory several times.  Here a tensor goes through in pieces that stay in the cores' caches.
// Each rank puts a piece into its slot; then each sums its part of the piece over all ranks, in the order
// of the ranks, and leaves the sum in the others' slots, where their parts were and whose lines it holds by
// now; then each collects the sums from its own.  With little data each sums the whole piece instead, and need
// not wait for the others a second time.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include <oneapi/ccl.hpp>

namespace cpulaunch {

class HostSum {
 public:
  // What `descriptor` has to refer to: zeroes, this many bytes.
  static size_t bytes(int size);
  // float32, float64 and bfloat16, which is summed in float32.
  static bool takes(ccl::datatype type, ccl::reduction reduction);

  // A descriptor of such memory, without a name, so that nothing of it can stay behind; -1 where there is none.
  static int make_memory(int size);

  // Throws std::system_error where the memory cannot be mapped.
  HostSum(int descriptor, int rank, int size);
  ~HostSum();
  HostSum(const HostSum&) = delete;
  HostSum& operator=(const HostSum&) = delete;

  // Every rank's `data` is to become their sum; the ranks add in the same order.  Returns the ticket.
  uint64_t add(void* data, size_t count, ccl::datatype type);
  // Does the next steps that can be done now, for whichever tensor.  True when the ticket's is summed.
  // Throws std::runtime_error where the ranks' tensors differ.
  bool advance(uint64_t ticket);
  // This rank has failed: nobody is to go on with what it has put there.
  void withdraw();
  // The ranks that have brought less than this one, such as "1, 3": those that it waits for, if it waits.
  std::string late();
  // Counts the steps done: while it grows, the others are there.
  uint64_t steps() const { return steps_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint64_t kSlots = 2;  // of each rank

  // How many pieces a rank has put and summed, since the beginning, and what is in its slots.
  struct Progress {
    alignas(64) std::atomic<uint64_t> put;
    size_t signatures[kSlots];  // written before `put`, on the same line
    alignas(64) std::atomic<uint64_t> summed;
  };
  using Stage = std::atomic<uint64_t> Progress::*;

  struct Kind;  // of numbers
  static const Kind* kind_of(ccl::datatype type);

  struct Piece {
    char* data;
    size_t bytes;
    size_t left;  // to the tensor's end, with this piece
    const Kind* kind;

    size_t signature() const;
  };

  struct Range {
    size_t begin, end;
  };

  const Piece& piece(uint64_t number) const { return pieces_[number - collected_]; }
  char* slot(int rank, uint64_t number) const;
  bool is_whole(const Piece& piece) const;
  Range part(const Piece& piece, int rank) const;
  bool others_passed(Stage stage, uint64_t number) const;
  bool is_free(uint64_t number) const;  // this rank's slot of that piece

  // Each returns how many bytes it was about; 0: nothing can be done now.
  size_t step();
  size_t put(uint64_t number);
  size_t sum(uint64_t number);
  size_t collect(uint64_t number);
  void check_alike(uint64_t number) const;
  static std::string shown(size_t signature);

  const int rank_;
  const int size_;
  const size_t piece_;  // bytes
  char* memory_;
  Progress* progress_;  // of each rank

  std::atomic<uint64_t> steps_{0};
  std::mutex mutex_;
  std::deque<Piece> pieces_;  // those that are not collected
  uint64_t added_ = 0, put_ = 0, summed_ = 0, collected_ = 0;
  bool withdrawn_ = false;
};

}  // namespace cpulaunch
