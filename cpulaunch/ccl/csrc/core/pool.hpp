// Memory for what a call needs until its transfer is done: the operation, the transfer, and lists.
//
// A block that is freed waits for the next object of its size, so after the first calls, no call needs malloc().  Any
// thread may free a block.  Nothing is locked, so a forked process can free blocks, too.  The process keeps at most
// kMostKept bytes in blocks of each size, so idle groups have nothing to give back here.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace cpulaunch {

class Pool {
 public:
  static void* take(size_t bytes) {
    if (!kKeeps || bytes > kMost) return ::operator new(bytes);
    const size_t index = index_of(bytes);
    for (size_t i = 0; i < places_of(index); ++i) {
      auto& place = kept_[index][i];
      if (!place.load(std::memory_order_relaxed)) continue;
      // Acquire: whoever gave the block no longer uses it.
      if (void* block = place.exchange(nullptr, std::memory_order_acquire)) return block;
    }
    return ::operator new(kLeast << index);
  }

  // `bytes` are those that were taken.
  static void give(void* block, size_t bytes) noexcept {
    if (!kKeeps || bytes > kMost || !keep(block, index_of(bytes))) ::operator delete(block);
  }

 private:
  // Returns false if all places are taken.
  static bool keep(void* block, size_t index) {
    for (size_t i = 0; i < places_of(index); ++i) {
      auto& place = kept_[index][i];
      void* nothing = nullptr;
      if (place.load(std::memory_order_relaxed)) continue;
      if (place.compare_exchange_strong(nothing, block, std::memory_order_release)) return true;
    }
    return false;
  }

  // Sanitizers must see each block come and go.  For ThreadSanitizer, a block would also order what two threads do.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  static constexpr bool kKeeps = false;
#else
  static constexpr bool kKeeps = true;
#endif
  // Blocks have sizes from kLeast to kMost, each twice the one before.  Larger ones are not kept.
  static constexpr size_t kLeast = 64, kMost = 64 << 10, kSizes = 11;
  static_assert(kLeast << (kSizes - 1) == kMost);
  static constexpr size_t kMostKept = 1 << 20, kMostPlaces = 512;

  static size_t index_of(size_t bytes) {
    size_t index = 0;
    while (kLeast << index < bytes) ++index;
    return index;
  }
  static size_t places_of(size_t index) { return std::min(kMostPlaces, kMostKept / (kLeast << index)); }

  inline static std::array<std::array<std::atomic<void*>, kMostPlaces>, kSizes> kept_{};  // null: an empty place
};

// The standard library's allocator over the pool.
template <class T>
struct Pooled {
  using value_type = T;

  Pooled() = default;
  template <class Other>
  Pooled(const Pooled<Other>&) {}

  T* allocate(size_t count) {
    static_assert(alignof(T) <= alignof(std::max_align_t));
    return static_cast<T*>(Pool::take(count * sizeof(T)));
  }
  void deallocate(T* memory, size_t count) noexcept { Pool::give(memory, count * sizeof(T)); }

  bool operator==(const Pooled&) const { return true; }
  bool operator!=(const Pooled&) const { return false; }
};

template <class T>
using PooledVector = std::vector<T, Pooled<T>>;

template <class T, class... Arguments>
std::shared_ptr<T> make_pooled(Arguments&&... arguments) {
  return std::allocate_shared<T>(Pooled<T>(), std::forward<Arguments>(arguments)...);
}

}  // namespace cpulaunch
