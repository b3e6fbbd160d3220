// Makes sums have the same bits on all threads, whatever a thread's floating-point mode is.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cpulaunch {

#if defined(__x86_64__)
using FloatMode = uint32_t;
constexpr FloatMode kFlushing = 0x8040;  // flush subnormal results and operands to zero
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

// During its lifetime, the calling thread does not flush subnormal numbers to zero, as torch.set_flush_denormal() makes
// some threads do.
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
