// Reductions of numbers in memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace cpulaunch {

enum class NumberType : uint8_t {
  float64, float32, float16, bfloat16, int64, int32, int16, int8, uint64, uint32, uint16, uint8, boolean
};
enum class Reduction : uint8_t { sum, average, product, min, max, bit_and, bit_or, bit_xor };
// How numbers travel between hosts: unchanged, or rounded to bfloat16 (only for sums of float32).
enum class Wire : uint8_t { exact, bfloat16 };

// The properties of all types, in the order of NumberType.
struct NumberTraits {
  const char* name;
  size_t bytes;
  bool is_floating;
};
inline constexpr NumberTraits kNumbers[] = {
    {"float64", 8, true}, {"float32", 4, true}, {"float16", 2, true},  {"bfloat16", 2, true}, {"int64", 8, false},
    {"int32", 4, false},  {"int16", 2, false},  {"int8", 1, false},    {"uint64", 8, false},  {"uint32", 4, false},
    {"uint16", 2, false}, {"uint8", 1, false},  {"bool", 1, false},
};
inline constexpr const char* kReductionNames[] = {"sum", "average",     "product",    "min",
                                                  "max", "bitwise and", "bitwise or", "bitwise xor"};

inline size_t size_of(NumberType type) { return kNumbers[static_cast<size_t>(type)].bytes; }
// Returns "unknown" for an invalid value, which another rank may have sent.
inline const char* name_of(NumberType type) {
  const auto number = static_cast<size_t>(type);
  return number < std::size(kNumbers) ? kNumbers[number].name : "unknown";
}
inline const char* name_of(Reduction reduction) {
  const auto number = static_cast<size_t>(reduction);
  return number < std::size(kReductionNames) ? kReductionNames[number] : "unknown";
}

inline bool is_bitwise(Reduction reduction) { return reduction >= Reduction::bit_and; }
// Floating-point numbers have no bitwise reductions, and bools no average.
inline bool has_reduction(NumberType type, Reduction reduction) {
  if (type == NumberType::boolean) return reduction != Reduction::average;
  return !is_bitwise(reduction) || !kNumbers[static_cast<size_t>(type)].is_floating;
}
// The reduction that computes this one.  An average is a sum that is divided afterwards.  A bool is a byte of 0 or 1
// and has to stay one, so that its sum is a maximum and its product a minimum.
inline Reduction as_calculated(NumberType type, Reduction reduction) {
  if (reduction == Reduction::average) return Reduction::sum;
  if (type == NumberType::boolean && reduction == Reduction::sum) return Reduction::max;
  if (type == NumberType::boolean && reduction == Reduction::product) return Reduction::min;
  return reduction;
}

// Reduces `sources` arrays of `bytes` each to one array.  The order of `from` determines the order of the operations,
// so the result has the same bits wherever it is computed.  `to` may be one of the sources.  16-bit floating-point
// numbers are reduced in float32 and rounded once.  A sum is divided by `divisor`: the number of ranks if this
// completes an average, otherwise 1.  Averages of integers are rounded towards zero.
using Reduce = void(char* to, const char* const* from, size_t sources, size_t bytes, int divisor);

// Returns null if the type doesn't have this reduction.
Reduce* reduce_for(NumberType type, Reduction reduction);
// Divides sums in place.
void divide(char* data, size_t bytes, NumberType type, int divisor);

// Convert `count` numbers between float32 and bfloat16.  Rounding is to the nearest, ties to even.
void to_bfloat16(char* to, const char* from, size_t count);
void from_bfloat16(char* to, const char* from, size_t count);

}  // namespace cpulaunch
