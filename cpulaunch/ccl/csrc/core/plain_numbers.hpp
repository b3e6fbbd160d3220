// Sums have the same bits on whichever thread they are calculated.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cpulaunch {

#if defined(__x86_64__)
using FloatMode = uint32_t;
constexpr FloatMode kFlushing = 0x8040;  // of subnormal results and operands
inline FloatMode float_mode() { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = uint64_t;
constexpr FloatMode kFlushing = 1 << 24 | 1 << 19;
inline FloatMode float_mode() {
  FloatMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(FloatMode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
using FloatMode = uint32_t;
constexpr FloatMode kFlushing = 0;
inline FloatMode float_mode() { return 0; }
inline void set_float_mode(FloatMode) {}
#endif

// While it lives, this thread doesn't take subnormal numbers for zero, as torch.set_flush_denormal() has some do.
class PlainNumbers {
 public:
  PlainNumbers() : mode_(float_mode()) {
    if (mode_ & kFlushing) set_float_mode(mode_ & ~kFlushing);
  }
  ~PlainNumbers() {
    if (mode_ & kFlushing) set_float_mode(mode_);
  }
  PlainNumbers(const PlainNumbers&) = delete;
  PlainNumbers& operator=(const PlainNumbers&) = delete;

 private:
  const FloatMode mode_;
};

}  // namespace cpulaunch
