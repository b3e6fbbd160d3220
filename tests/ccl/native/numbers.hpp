// Made-up numbers of every type, and what becomes of them when they are reduced one by one.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arithmetic.hpp"

namespace cpulaunch {

constexpr NumberType kTypes[] = {
    NumberType::float64, NumberType::float32, NumberType::float16, NumberType::bfloat16, NumberType::int64,
    NumberType::int32,   NumberType::int16,   NumberType::int8,    NumberType::uint64,   NumberType::uint32,
    NumberType::uint16,  NumberType::uint8,   NumberType::boolean};
constexpr Reduction kReductions[] = {Reduction::sum, Reduction::average, Reduction::product, Reduction::min,
                                     Reduction::max, Reduction::bit_and, Reduction::bit_or,  Reduction::bit_xor};
static_assert(kReductions[1] == Reduction::average);  // the first two add

struct Numbers {
  Numbers(NumberType type, size_t count) : type(type), memory(count * size_of(type)) {}

  size_t count() const { return memory.size() / size_of(type); }
  size_t bytes() const { return memory.size(); }
  char* data() { return memory.data(); }
  uint64_t digest() const;  // differs where the bits do; never 0

  NumberType type;
  std::vector<char> memory;
};

// Which numbers: a rank's, for one of its tensors.  They don't overflow a floating-point type when they are reduced.
struct Source {
  uint64_t seed;
  NumberType type;
  Reduction reduction = Reduction::sum;
};

// What `rank` has.
Numbers make_numbers(const Source& source, int rank, size_t count);
// Changes one of some whole numbers.
void spoil(Numbers& numbers);

// Both throw std::runtime_error where `got` isn't what `rank` has, or not the reduction of what `size` ranks have: that
// of floating-point numbers but for so many roundings as a transport may do.
void expect_numbers(const Numbers& got, const Source& source, int rank);
void expect_reduced(const Numbers& got, const Source& source, int size);

// Throws std::runtime_error where `got` isn't the sum of what ranks on these hosts have, which is sent between hosts as
// bfloat16.
void expect_compressed_sum(const Numbers& got, const Source& source, const std::vector<int>& host_of);

// Reduces many pairs of 16-bit floating-point numbers, converts many others, and throws where one is not rounded as
// IEEE 754 says.
void check_rounding(uint64_t seed, int rounds);

}  // namespace cpulaunch
