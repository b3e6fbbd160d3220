// Made-up numbers of every type, and their reductions, calculated one number at a time.

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
static_assert(kReductions[1] == Reduction::average);  // the first two are sums

struct Numbers {
  Numbers(NumberType type, size_t count) : type(type), memory(count * size_of(type)) {}

  size_t count() const { return memory.size() / size_of(type); }
  size_t bytes() const { return memory.size(); }
  char* data() { return memory.data(); }
  uint64_t digest() const;  // different bits have different digests; never 0

  NumberType type;
  std::vector<char> memory;
};

// Determines the numbers of all ranks for one of their tensors.  Reducing them doesn't overflow a floating-point type.
struct Source {
  uint64_t seed;
  NumberType type;
  Reduction reduction = Reduction::sum;
};

// Returns the numbers of `rank`.
Numbers make_numbers(const Source& source, int rank, size_t count);
// Changes one of the numbers, which must be whole numbers.
void spoil(Numbers& numbers);

// Both throw std::runtime_error: if `got` isn't what `rank` has, or isn't the reduction of what `size` ranks have.  A
// reduction of floating-point numbers may have the rounding errors that a transport may make.
void expect_numbers(const Numbers& got, const Source& source, int rank);
void expect_reduced(const Numbers& got, const Source& source, int size);

// Throws std::runtime_error if `got` isn't the sum of what the ranks on these hosts have, when hosts exchange bfloat16.
void expect_compressed_sum(const Numbers& got, const Source& source, const std::vector<int>& host_of);

// Reduces many pairs of 16-bit floating-point numbers and converts many others.  Throws if a result isn't rounded
// according to IEEE 754.
void check_rounding(uint64_t seed, int rounds);

}  // namespace cpulaunch
