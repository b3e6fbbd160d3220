// Reductions of numbers in memory.

#pragma once

#include <cstddef>
#include <cstdint>

namespace cpulaunch {

enum class NumberType : uint8_t {
  float64, float32, float16, bfloat16, int64, int32, int16, int8, uint64, uint32, uint16, uint8, boolean
};
enum class Reduction : uint8_t { sum, average, product, min, max, bit_and, bit_or, bit_xor };
// How numbers travel between hosts: as they are, or sums of float32 as bfloat16.
enum class Wire : uint8_t { exact, bfloat16 };

size_t size_of(NumberType type);  // bytes
// "unknown" where another rank has sent something that is none.
const char* name_of(NumberType type);
const char* name_of(Reduction reduction);

// Reduces `sources` arrays of `bytes` each to one, in the order of `from`, which makes the result's bits the same
// wherever it is computed.  `to` may be one of the sources.  16-bit floating-point numbers are reduced in float32 and
// rounded once.  A bool is a byte of 0 or 1 and stays one.  A sum is divided by `divisor`: the number of ranks where it
// completes an average, else 1.  Averages of whole numbers are rounded towards zero.
using Reduce = void(char* to, const char* const* from, size_t sources, size_t bytes, int divisor);

// Null where the type has no such reduction: floating-point numbers have no bitwise ones, and bools no average.  That
// of an average is a sum.
Reduce* reduce_for(NumberType type, Reduction reduction);
// Divides sums in place.
void divide(char* data, size_t bytes, NumberType type, int divisor);

// Rounds `count` float32 numbers to bfloat16, of two nearest ones to the even one; and back.
void to_bfloat16(char* to, const char* from, size_t count);
void from_bfloat16(char* to, const char* from, size_t count);

}  // namespace cpulaunch
