// Copies of large results, which are not read again soon.

#pragma once

#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace cpulaunch {

// Copies parts of a result.  If the result is larger than the caches, the stores bypass them.  These stores
// need not read the cache line first, and leave the caches to the slots.
class Copy {
 public:
  // The whole result has `bytes`.  Results of `large` bytes or more are larger than the caches.
  explicit Copy(size_t bytes, size_t large = kLarge) : past_caches_(bytes >= large) {}

  static constexpr size_t kLarge = 8 << 20;  // bytes; the least value of `large`

  void run(char* to, const char* from, size_t bytes) const {
#if defined(__x86_64__)
    if (past_caches_) {
      stream(to, from, bytes);
      return;
    }
#endif
    std::memcpy(to, from, bytes);
  }

 private:
#if defined(__x86_64__)
  static void stream(char* to, const char* from, size_t bytes) {
    constexpr size_t kVector = sizeof(__m128i), kLine = 4 * kVector;
    const size_t head = (kLine - reinterpret_cast<size_t>(to) % kLine) % kLine;
    if (bytes <= head + kLine) {
      std::memcpy(to, from, bytes);
      return;
    }
    std::memcpy(to, from, head);
    size_t at = head;
    for (; at + kLine <= bytes; at += kLine) {
      const auto* source = reinterpret_cast<const __m128i*>(from + at);
      auto* target = reinterpret_cast<__m128i*>(to + at);
      const auto a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const auto c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    std::memcpy(to + at, from + at, bytes - at);
    _mm_sfence();
  }
#endif

  const bool past_caches_;
};

}  // namespace cpulaunch
