#include "numbers.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <type_traits>

#include "layout.hpp"

namespace cpulaunch {

namespace {

// --- floating-point types by their definition in IEEE 754 (arithmetic.cpp works on their bits)

// A type with `kBits` bits of the significand, without the first one; `kLeast` is the exponent of its smallest normal
// number.
template <int kBits, int kLeast>
struct Half {
  uint16_t bits;

  static constexpr int kBias = 1 - kLeast, kMost = kBias;

  static double value(Half half) {
    const int exponent = half.bits >> kBits & ((1 << (15 - kBits)) - 1), fraction = half.bits & ((1 << kBits) - 1);
    double magnitude;
    if (exponent > kMost + kBias) {
      magnitude = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else {
      const double significand = std::ldexp(fraction, -kBits) + (exponent ? 1 : 0);
      magnitude = std::ldexp(significand, std::max(exponent, 1) - kBias);
    }
    return half.bits & 0x8000 ? -magnitude : magnitude;
  }

  // Returns the nearest number.  Of two that are equally near, takes the one with an even significand, like
  // nearbyint().
  static Half nearest(double value) {
    constexpr int kInfinity = (kMost + kBias + 1) << kBits;
    if (std::isnan(value)) return {static_cast<uint16_t>(kInfinity | 1 << (kBits - 1))};
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    const int exponent = std::isinf(value) ? kMost + 1 : std::max(std::ilogb(magnitude), kLeast);
    if (exponent > kMost) return {static_cast<uint16_t>(sign | kInfinity)};
    // The significand in steps of this exponent.  If rounding gives one step too many, the sum below carries into the
    // exponent.
    const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, kBits - exponent)));
    return {static_cast<uint16_t>(sign | (steps + ((exponent - kLeast) << kBits)))};
  }
};

using Float16 = Half<10, -14>;
using BFloat16 = Half<7, -126>;

struct Bool {
  uint8_t value;
};

template <class T>
double to_double(T number) {
  return static_cast<double>(number);
}
template <int kBits, int kLeast>
double to_double(Half<kBits, kLeast> number) {
  return Half<kBits, kLeast>::value(number);
}

template <class T>
T from_double(double value) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value);
  } else {
    return T::nearest(value);
  }
}

// Half of the distance between 1 and the next number.
template <class T>
constexpr double kUnit = std::numeric_limits<T>::epsilon() / 2.0;
template <>
constexpr double kUnit<Float16> = 0x1p-11;
template <>
constexpr double kUnit<BFloat16> = 0x1p-8;

template <class T>
constexpr bool is_whole_number = std::is_integral_v<T>;

// Calls `act` with a number of the type.
template <class Act>
void with_type(NumberType type, const Act& act) {
  switch (type) {
    case NumberType::float64: return act(double{});
    case NumberType::float32: return act(float{});
    case NumberType::float16: return act(Float16{});
    case NumberType::bfloat16: return act(BFloat16{});
    case NumberType::int64: return act(int64_t{});
    case NumberType::int32: return act(int32_t{});
    case NumberType::int16: return act(int16_t{});
    case NumberType::int8: return act(int8_t{});
    case NumberType::uint64: return act(uint64_t{});
    case NumberType::uint32: return act(uint32_t{});
    case NumberType::uint16: return act(uint16_t{});
    case NumberType::uint8: return act(uint8_t{});
    case NumberType::boolean: return act(Bool{});
  }
}

template <class T>
T read(const Numbers& numbers, size_t i) {
  T number;
  std::memcpy(&number, numbers.memory.data() + i * sizeof(T), sizeof(T));
  return number;
}

// --- the numbers that ranks have

uint64_t mix(uint64_t word) {  // splitmix64
  word += 0x9e3779b97f4a7c15;
  word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
  word = (word ^ word >> 27) * 0x94d049bb133111eb;
  return word ^ word >> 31;
}

template <class T>
T made_up(const Source& source, int rank, size_t i) {
  const uint64_t word = mix(source.seed * 1'000'003 + rank * 7919 + (i << 20));
  if constexpr (is_whole_number<T>) {
    return static_cast<T>(word);
  } else if constexpr (std::is_same_v<T, Bool>) {
    return {static_cast<uint8_t>(word & 1)};
  } else {
    const int whole = static_cast<int>(word % 4001) - 2000;
    const double small = source.reduction == Reduction::product ? 1 + whole / 8000.0 : whole / 256.0;
    return from_double<T>(small);
  }
}

// --- what the numbers reduce to

// Integers wrap around.
uint64_t combine(Reduction reduction, uint64_t a, uint64_t b) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::average: return a + b;
    case Reduction::product: return a * b;
    case Reduction::bit_and: return a & b;
    case Reduction::bit_or: return a | b;
    default: return a ^ b;
  }
}

template <class T>
T reduced(const Source& source, int size, size_t i) {
  T total = made_up<T>(source, 0, i);
  for (int rank = 1; rank < size; ++rank) {
    const T next = made_up<T>(source, rank, i);
    if (source.reduction == Reduction::min) {
      total = std::min(total, next);
    } else if (source.reduction == Reduction::max) {
      total = std::max(total, next);
    } else {
      total = static_cast<T>(combine(source.reduction, static_cast<uint64_t>(total), static_cast<uint64_t>(next)));
    }
  }
  if (source.reduction == Reduction::average) total = static_cast<T>(total / size);
  return total;
}

// A sum of bools is true if any of them is true, and a product if all are.
template <>
Bool reduced<Bool>(const Source& source, int size, size_t i) {
  int trues = 0;
  for (int rank = 0; rank < size; ++rank) trues += made_up<Bool>(source, rank, i).value;
  switch (source.reduction) {
    case Reduction::sum:
    case Reduction::max:
    case Reduction::bit_or: return {trues > 0};
    case Reduction::bit_xor: return {trues % 2 == 1};
    default: return {trues == size};
  }
}

// The value to which numbers reduce, and the error that a transport may make.
struct Expected {
  double value, tolerance;
};

template <class T>
Expected reduced_nearly(const Source& source, int size, size_t i) {
  double total = to_double(made_up<T>(source, 0, i)), most = std::fabs(total);
  for (int rank = 1; rank < size; ++rank) {
    const double next = to_double(made_up<T>(source, rank, i));
    switch (source.reduction) {
      case Reduction::sum:
      case Reduction::average: total += next, most += std::fabs(next); break;
      case Reduction::product: total *= next, most = std::fabs(total); break;
      case Reduction::min: total = std::min(total, next); break;
      default: total = std::max(total, next);
    }
  }
  const bool average = source.reduction == Reduction::average;
  if (average) total /= size, most /= size;
  const bool exact = source.reduction == Reduction::min || source.reduction == Reduction::max || size == 1;
  // 16-bit numbers are rounded once on each socket, on each host and in each dimension of the grid, which has at most
  // two here.  The errors of a product's factors add up.  Other numbers are rounded in each step, here and in the
  // transport.
  const bool sum_of_16_bits = sizeof(T) == 2 && (average || source.reduction == Reduction::sum);
  const int roundings = (sum_of_16_bits ? std::min(size, 4) : 2 * size) + average;
  return {total, exact ? 0 : 1.01 * roundings * kUnit<T> * most};
}

[[noreturn]] void fail(size_t i, const std::string& got, const std::string& wanted) {
  throw std::runtime_error("at " + std::to_string(i) + ": " + got + ", not " + wanted);
}

template <class T>
std::string text(T number) {
  if constexpr (std::is_same_v<T, Bool>) {
    return std::to_string(number.value);
  } else if constexpr (is_whole_number<T>) {
    return std::to_string(number);
  } else {
    return std::to_string(to_double(number));
  }
}

template <class T>
void expect_reduced_of(const Numbers& got, const Source& source, int size) {
  for (size_t i = 0; i < got.count(); ++i) {
    const T number = read<T>(got, i);
    if constexpr (is_whole_number<T> || std::is_same_v<T, Bool>) {
      const T wanted = reduced<T>(source, size, i);
      if (std::memcmp(&number, &wanted, sizeof(T)) != 0) fail(i, text(number), text(wanted));
    } else {
      const auto [value, tolerance] = reduced_nearly<T>(source, size, i);
      const double error = std::fabs(to_double(number) - value);
      if (!(error <= tolerance)) fail(i, text(number), std::to_string(value));  // a NaN, too
    }
  }
}

// Calculates in float64, in which all these sums are exact.
double compressed_sum(const Source& source, const Layout& layout, size_t i) {
  std::vector<double> sums(layout.hosts);
  for (int rank = 0; rank < layout.size; ++rank) {
    sums[layout.host_numbers[rank]] += made_up<float>(source, rank, i);
  }
  if (layout.hosts == 1) return sums[0];
  const auto rounded = [](double sum) { return BFloat16::value(BFloat16::nearest(sum)); };
  size_t in_grid = layout.hosts_in_grid();  // followed, in the first dimension, by the guests of its rows
  for (const int row : layout.grid) {
    std::vector<double> of_rows(in_grid / row);
    for (size_t host = 0; host < sums.size(); ++host) {
      of_rows[host < in_grid ? host / row : (host - in_grid) % of_rows.size()] += rounded(sums[host]);
    }
    sums = of_rows;
    in_grid = sums.size();
  }
  return rounded(sums[0]);
}

// --- roundings

float combine(Reduction reduction, float a, float b, int divisor) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
  switch (reduction) {
    case Reduction::sum: return a + b;
    case Reduction::average: return (a + b) / static_cast<float>(divisor);
    case Reduction::product: return a * b;
    case Reduction::min: return std::min(a, b);
    default: return std::max(a, b);
  }
}

// Converts every bfloat16 number, and as many random float32 numbers.
void check_conversions(std::mt19937_64& random) {
  std::vector<uint16_t> every((1 << 16) - 1), rounded(every.size());
  std::vector<uint32_t> wide(every.size()), widened(every.size());
  for (auto& word : wide) word = static_cast<uint32_t>(random());
  for (size_t i = 0; i < every.size(); ++i) every[i] = static_cast<uint16_t>(i);
  from_bfloat16(reinterpret_cast<char*>(widened.data()), reinterpret_cast<const char*>(every.data()), every.size());
  to_bfloat16(reinterpret_cast<char*>(rounded.data()), reinterpret_cast<const char*>(wide.data()), wide.size());
  for (size_t i = 0; i < every.size(); ++i) {
    float number;
    std::memcpy(&number, &wide[i], sizeof(number));
    const bool is_right = widened[i] == uint32_t{every[i]} << 16 && rounded[i] == BFloat16::nearest(number).bits;
    if (!is_right) throw std::runtime_error("conversion of " + std::to_string(i) + " or " + std::to_string(number));
  }
}

// Reduces pairs of each number and a random one.  The numbers come in order, but begin with a random one, so that each
// run has them at other places in the vectors.
template <class T>
void check_pairs(NumberType type, Reduction reduction, int divisor, std::mt19937_64& random) {
  std::vector<T> a, b, got((1 << 16) - 1);  // one fewer than all, so that the last vector isn't full
  for (uint64_t word = random(); a.size() < got.size(); ++word) {
    a.push_back({static_cast<uint16_t>(word)});
    b.push_back({static_cast<uint16_t>(random())});
  }
  const char* from[] = {reinterpret_cast<const char*>(a.data()), reinterpret_cast<const char*>(b.data())};
  reduce_for(type, reduction)(reinterpret_cast<char*>(got.data()), from, 2, got.size() * sizeof(T), divisor);
  for (size_t i = 0; i < got.size(); ++i) {
    const auto one = static_cast<float>(T::value(a[i])), other = static_cast<float>(T::value(b[i]));
    const auto wide = combine(reduction, one, other, divisor);
    const T wanted = T::nearest(wide);
    if (got[i].bits == wanted.bits || (std::isnan(wide) && std::isnan(T::value(got[i])))) continue;
    throw std::runtime_error(std::string(name_of(reduction)) + " of " + name_of(type) + " with bits " +
                             std::to_string(a[i].bits) + " and " + std::to_string(b[i].bits) + ": " +
                             std::to_string(got[i].bits) + ", not " + std::to_string(wanted.bits));
  }
}

// Vectors and a loop over single numbers give float16 sums with the same bits.  Each number is added to the numbers
// where rounding changes: around zero, the subnormals, 1, infinity and NaN.
void check_sums_of_float16() {
  constexpr uint16_t kSpecial[] = {0x0000, 0x0001, 0x03ff, 0x0400, 0x0401, 0x3c00, 0x3c01, 0x7bff, 0x7c00, 0x7c01,
                                   0x7dff, 0x7e00, 0x7fff, 0x1000, 0x5800};
  std::vector<uint16_t> every(1 << 16), other(every.size()), got(every.size());
  for (size_t i = 0; i < every.size(); ++i) every[i] = static_cast<uint16_t>(i);
  auto* const sum = reduce_for(NumberType::float16, Reduction::sum);
  const auto check = [&](size_t sources, int divisor) {
    const char* from[] = {reinterpret_cast<const char*>(every.data()), reinterpret_cast<const char*>(other.data())};
    sum(reinterpret_cast<char*>(got.data()), from, sources, got.size() * 2, divisor);
    for (size_t i = 0; i < every.size(); ++i) {
      const char* one[] = {from[0] + 2 * i, from[1] + 2 * i};
      uint16_t wanted;
      sum(reinterpret_cast<char*>(&wanted), one, sources, 2, divisor);
      if (got[i] == wanted) continue;
      throw std::runtime_error("the sum of float16 with bits " + std::to_string(every[i]) + " and " +
                               std::to_string(other[i]) + ", divided by " + std::to_string(divisor) + ": " +
                               std::to_string(got[i]) + ", alone " + std::to_string(wanted));
    }
  };
  for (const int divisor : {1, 2, 3}) check(1, divisor);
  for (const uint16_t special : kSpecial) {
    for (const int sign : {0, 0x8000}) {
      std::fill(other.begin(), other.end(), static_cast<uint16_t>(special | sign));
      check(2, 1);
    }
  }
}

}  // namespace

uint64_t Numbers::digest() const {
  uint64_t digest = bytes();
  for (size_t at = 0; at < bytes(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, memory.data() + at, std::min(sizeof(word), bytes() - at));
    digest = mix(digest ^ word);
  }
  return digest | 1;
}

Numbers make_numbers(const Source& source, int rank, size_t count) {
  Numbers numbers(source.type, count);
  with_type(source.type, [&](auto typed) {
    using T = decltype(typed);
    for (size_t i = 0; i < count; ++i) {
      const T number = made_up<T>(source, rank, i);
      std::memcpy(numbers.data() + i * sizeof(T), &number, sizeof(T));
    }
  });
  return numbers;
}

void spoil(Numbers& numbers) {
  // Flips the lowest bit of a byte.  In whole numbers, that shows whatever else is added.
  if (numbers.bytes()) numbers.memory[numbers.bytes() / 2] ^= 1;
}

void expect_numbers(const Numbers& got, const Source& source, int rank) {
  const auto wanted = make_numbers(source, rank, got.count());
  if (got.memory == wanted.memory) return;
  const auto differ = std::mismatch(got.memory.begin(), got.memory.end(), wanted.memory.begin()).first;
  const auto at = static_cast<size_t>(differ - got.memory.begin()) / size_of(got.type);
  with_type(got.type, [&](auto typed) {
    using T = decltype(typed);
    fail(at, text(read<T>(got, at)), text(read<T>(wanted, at)));
  });
}

void expect_reduced(const Numbers& got, const Source& source, int size) {
  with_type(source.type, [&](auto typed) { expect_reduced_of<decltype(typed)>(got, source, size); });
}

void expect_compressed_sum(const Numbers& got, const Source& source, const std::vector<int>& host_of) {
  const Layout layout(host_of, 0);
  for (size_t i = 0; i < got.count(); ++i) {
    const auto sum = static_cast<float>(compressed_sum(source, layout, i));
    const float wanted = source.reduction == Reduction::average ? sum / static_cast<float>(layout.size) : sum;
    const auto number = read<float>(got, i);
    if (number != wanted) fail(i, std::to_string(number), std::to_string(wanted));
  }
}

void check_rounding(uint64_t seed, int rounds) {
  std::mt19937_64 random(seed);
  check_sums_of_float16();
  for (int round = 0; round < rounds; ++round) {
    check_conversions(random);
    const auto check_types = [&](Reduction reduction, int divisor) {
      check_pairs<Float16>(NumberType::float16, reduction, divisor, random);
      check_pairs<BFloat16>(NumberType::bfloat16, reduction, divisor, random);
    };
    for (const auto reduction : {Reduction::sum, Reduction::product, Reduction::min, Reduction::max}) {
      check_types(reduction, 1);
    }
    for (const int divisor : {2, 3, 4, 7}) check_types(Reduction::average, divisor);
  }
}

}  // namespace cpulaunch
