#include "arithmetic.hpp"

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "plain_numbers.hpp"

namespace cpulaunch {

namespace {

#define CPULAUNCH_INLINE inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"  // about passing vectors: all functions that take them are inlined

// Defines versions of a function for several instruction sets, because the library may run on another CPU than it was
// built on.  Each returns `call`, in which kWidth is the size of a vector register in bytes.  With ThreadSanitizer
// there is one version: the code that chooses among several runs before ThreadSanitizer is initialized.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define CPULAUNCH_VERSIONS(declaration, call)                                  \
  __attribute__((target("avx512f"))) CPULAUNCH_VERSION(64, declaration, call)  \
  __attribute__((target("avx2"))) CPULAUNCH_VERSION(32, declaration, call)     \
  __attribute__((target("default"))) CPULAUNCH_VERSION(16, declaration, call)
#else
#define CPULAUNCH_VERSIONS(declaration, call) CPULAUNCH_VERSION(16, declaration, call)
#endif
#define CPULAUNCH_VERSION(width, declaration, call) \
  declaration {                                     \
    constexpr size_t kWidth = width;                \
    return call;                                    \
  }

template <class To, class From>
CPULAUNCH_INLINE To bits_of(const From& value) {
  To bits;
  static_assert(sizeof(bits) == sizeof(value));
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// --- how numbers are stored, and in which type they are reduced

template <class Number>
struct Stored {
  using Wide = Number;
  static Wide widen(Number number) { return number; }
  static Number narrow(Wide wide) { return wide; }
};

struct BFloat16 {  // the upper half of a float
  using Wide = float;
  uint16_t bits;

  static CPULAUNCH_INLINE float widen(BFloat16 number) { return bits_of<float>(uint32_t{number.bits} << 16); }
  static CPULAUNCH_INLINE BFloat16 narrow(float wide) {
    const auto word = bits_of<uint32_t>(wide);
    const auto rounded = wide == wide ? word + 0x7fff + (word >> 16 & 1) : 0x7fc00000;
    return {static_cast<uint16_t>(rounded >> 16)};
  }
};

struct Float16 {  // IEEE 754's binary16: 5 bits of exponent, 10 of fraction
  using Wide = float;
  uint16_t bits;

  static CPULAUNCH_INLINE float widen(Float16 number) { return widen_all<float>(uint32_t{number.bits}); }
  static CPULAUNCH_INLINE Float16 narrow(float wide) { return {static_cast<uint16_t>(narrow_all<uint32_t>(wide))}; }

  // Convert one number or a vector of them.  A number's bits are in the lower half of a word.
  template <class Floats, class Words>
  static CPULAUNCH_INLINE Floats widen_all(const Words& words) {
    const Words sign = (words & 0x8000u) << 16, rest = words & 0x7fffu;
    constexpr float kExponents = 0x1p112f;  // the difference of the exponents' biases; also normalizes subnormals
    const Words finite = bits_of<Words>(bits_of<Floats>(rest << 13) * kExponents);
    const Words others = 0x7f800000u | (rest & 0x3ffu) << 13;
    return bits_of<Floats>(sign | (rest < 0x7c00u ? finite : others));
  }
  template <class Words, class Floats>
  static CPULAUNCH_INLINE Words narrow_all(const Floats& wide) {
    const auto word = bits_of<Words>(wide);
    const Words sign = word >> 16 & 0x8000u, magnitude = word & 0x7fffffffu;
    const Words normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    // Adding 0.5 makes the processor round to multiples of 2^-24.
    const Words subnormal = bits_of<Words>(bits_of<Floats>(magnitude) + 0.5f) - bits_of<uint32_t>(0.5f);
    const Words infinity = Words{} + 0x7c00u, not_a_number = Words{} + 0x7e00u;
    Words half = magnitude < bits_of<uint32_t>(0x1p-14f) ? subnormal : normal;
    half = magnitude < bits_of<uint32_t>(65520.0f) ? half : infinity;
    return sign | (magnitude > 0x7f800000u ? not_a_number : half);
  }
};

template <>
struct Stored<BFloat16> : BFloat16 {};
template <>
struct Stored<Float16> : Float16 {};

// --- reductions of any type, in blocks that the compiler vectorizes

// The type for additions and multiplications.  For integers it is unsigned: these may overflow, and wrap around as in
// torch.
template <class Wide, bool = std::is_integral_v<Wide>>
struct ArithmeticType {
  using Type = Wide;
};
template <class Wide>
struct ArithmeticType<Wide, true> {
  using Type = std::make_unsigned_t<decltype(Wide{} + Wide{})>;
};

template <Reduction reduction, class Wide>
CPULAUNCH_INLINE Wide combine(Wide a, Wide b) {
  using Number = typename ArithmeticType<Wide>::Type;
  if constexpr (reduction == Reduction::sum) {
    return static_cast<Wide>(static_cast<Number>(a) + static_cast<Number>(b));
  } else if constexpr (reduction == Reduction::product) {
    return static_cast<Wide>(static_cast<Number>(a) * static_cast<Number>(b));
  } else if constexpr (reduction == Reduction::min) {
    const Wide least = b < a ? b : a;
    return b != b ? b : least;  // a NaN in either makes the result NaN, as in torch; two steps need no branches
  } else if constexpr (reduction == Reduction::max) {
    const Wide most = a < b ? b : a;
    return b != b ? b : most;
  } else if constexpr (reduction == Reduction::bit_and) {
    return static_cast<Wide>(a & b);
  } else if constexpr (reduction == Reduction::bit_or) {
    return static_cast<Wide>(a | b);
  } else {
    return static_cast<Wide>(a ^ b);
  }
}

// Divides sums for averages.  If the divisor is a power of two, it multiplies: that is faster, and exact.
template <class Wide, bool = std::is_integral_v<Wide>>
struct Divisor {
  static CPULAUNCH_INLINE Divisor by(int divisor) {  // clang omits constructors in functions with versions
    return {static_cast<Wide>(divisor), 1 / static_cast<Wide>(divisor), (divisor & (divisor - 1)) == 0};
  }

  template <class Numbers>  // one number or a vector
  CPULAUNCH_INLINE void divide(Numbers& numbers) const {
    if (is_exact) {
      numbers *= factor;
    } else {
      numbers /= divisor;
    }
  }

  Wide divisor, factor;
  bool is_exact;
};
template <class Wide>
struct Divisor<Wide, true> {
  static CPULAUNCH_INLINE Divisor by(int divisor) { return {divisor}; }

  CPULAUNCH_INLINE void divide(Wide& number) const {
    if (divisor != 1) number = static_cast<Wide>(number / divisor);
  }

  int divisor;
};

// Reduces the bytes from `begin` to `end` of each source.
template <class Number, Reduction reduction>
void reduce_range(char* to, const char* const* from, size_t sources, size_t begin, size_t end, int divisor) {
  using As = Stored<Number>;
  const auto by = Divisor<typename As::Wide>::by(divisor);
  constexpr size_t kNumbers = 64;  // reduced at once
  typename As::Wide total[kNumbers];
  Number read[kNumbers];
  for (size_t at = begin; at < end; at += sizeof(read)) {
    const size_t length = std::min(end - at, sizeof(read)), count = length / sizeof(Number);
    std::memcpy(read, from[0] + at, length);
    for (size_t i = 0; i < count; ++i) total[i] = As::widen(read[i]);
    for (size_t source = 1; source < sources; ++source) {
      std::memcpy(read, from[source] + at, length);
      for (size_t i = 0; i < count; ++i) total[i] = combine<reduction>(total[i], As::widen(read[i]));
    }
    if constexpr (reduction == Reduction::sum) {
      for (size_t i = 0; i < count; ++i) by.divide(total[i]);
    }
    for (size_t i = 0; i < count; ++i) read[i] = As::narrow(total[i]);
    std::memcpy(to + at, read, length);
  }
}

template <class Number, Reduction reduction>
void reduce_any(char* to, const char* const* from, size_t sources, size_t bytes, int divisor) {
  reduce_range<Number, reduction>(to, from, sources, 0, bytes, divisor);
}

// --- sums of the types in which models train, in the compiler's generic vectors

// Vectors of `width` bytes, the size of a register.  g++ would keep wider ones in memory.
template <size_t width>
struct Vectors {
  typedef float Floats __attribute__((vector_size(width)));
  typedef double Doubles __attribute__((vector_size(width)));
  typedef uint32_t Words __attribute__((vector_size(width)));
  typedef uint16_t Shorts __attribute__((vector_size(width / 2)));
  static constexpr size_t kNumbers = width / sizeof(float);
};

// Sums vectors of numbers without conversion.
template <class Number, class Vector>
struct Plain {
  using Wide = Number;
  static constexpr size_t kWidth = sizeof(Vector);

  CPULAUNCH_INLINE void start(const char* from) { std::memcpy(&sum, from, kWidth); }
  CPULAUNCH_INLINE void add(const char* from) {
    Vector vector;
    std::memcpy(&vector, from, kWidth);
    sum += vector;
  }
  CPULAUNCH_INLINE void divide(const Divisor<Wide>& by) { by.divide(sum); }
  CPULAUNCH_INLINE void store(char* to) const { std::memcpy(to, &sum, kWidth); }

  Vector sum;
};

// Sums bfloat16 numbers.  A word holds two of them.  They are summed in separate vectors, because moving them within a
// vector would cost more than the sum.
template <size_t width>
struct Halves {
  using Wide = float;
  using Floats = typename Vectors<width>::Floats;
  using Words = typename Vectors<width>::Words;
  static constexpr size_t kWidth = width;
  static constexpr uint32_t kUpper = 0xffff0000;

  CPULAUNCH_INLINE void start(const char* from) {
    lower = upper = -Floats{};  // -0, because a sum of -0 alone is -0
    add(from);
  }
  CPULAUNCH_INLINE void add(const char* from) {
    Words words;
    std::memcpy(&words, from, kWidth);
    lower += reinterpret_cast<Floats>(words << 16);
    upper += reinterpret_cast<Floats>(words & kUpper);
  }
  CPULAUNCH_INLINE void divide(const Divisor<Wide>& by) {
    by.divide(lower);
    by.divide(upper);
  }
  CPULAUNCH_INLINE void store(char* to) const {
    const Words words = round(lower) >> 16 | (round(upper) & kUpper);
    std::memcpy(to, &words, kWidth);
  }
  // Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
  static CPULAUNCH_INLINE Words round(const Floats& value) {
    const auto word = reinterpret_cast<Words>(value);
    return value == value ? word + 0x7fff + (word >> 16 & 1) : Words{} + 0x7fc00000;
  }

  Floats lower, upper;
};

// Sums float16 numbers.
template <size_t width>
struct Float16s {
  using Wide = float;
  using V = Vectors<width>;
  static constexpr size_t kWidth = width / 2;

  static CPULAUNCH_INLINE typename V::Floats read(const char* from) {
    typename V::Shorts numbers;
    std::memcpy(&numbers, from, kWidth);
    return Float16::widen_all<typename V::Floats>(__builtin_convertvector(numbers, typename V::Words));
  }
  CPULAUNCH_INLINE void start(const char* from) { sum = read(from); }
  CPULAUNCH_INLINE void add(const char* from) { sum += read(from); }
  CPULAUNCH_INLINE void divide(const Divisor<Wide>& by) { by.divide(sum); }
  CPULAUNCH_INLINE void store(char* to) const {
    const auto words = Float16::narrow_all<typename V::Words>(sum);
    const auto numbers = __builtin_convertvector(words, typename V::Shorts);
    std::memcpy(to, &numbers, kWidth);
  }

  typename V::Floats sum;
};

template <bool divides, class Sum>
CPULAUNCH_INLINE size_t sum_blocks(char* to, const char* const* from, size_t sources, size_t bytes, int divisor) {
  constexpr size_t kVectors = 4, kBlock = kVectors * Sum::kWidth;
  const size_t blocks = bytes / kBlock * kBlock;
  const auto by = Divisor<typename Sum::Wide>::by(divisor);
  Sum sums[kVectors];
  for (size_t at = 0; at < blocks; at += kBlock) {
    for (size_t i = 0; i < kVectors; ++i) sums[i].start(from[0] + at + i * Sum::kWidth);
    for (size_t source = 1; source < sources; ++source) {
      for (size_t i = 0; i < kVectors; ++i) sums[i].add(from[source] + at + i * Sum::kWidth);
    }
    for (size_t i = 0; i < kVectors; ++i) {
      if constexpr (divides) sums[i].divide(by);
      sums[i].store(to + at + i * Sum::kWidth);
    }
  }
  return blocks;
}

// Sums whole blocks, and returns their size in bytes.
template <class Sum>
CPULAUNCH_INLINE size_t sum_blocks(char* to, const char* const* from, size_t sources, size_t bytes, int divisor) {
  return divisor == 1 ? sum_blocks<false, Sum>(to, from, sources, bytes, divisor)
                      : sum_blocks<true, Sum>(to, from, sources, bytes, divisor);
}

// Convert whole vectors from float32 to bfloat16, and back.  They return how many numbers were converted.
template <size_t width>
CPULAUNCH_INLINE size_t round_vectors(char* to, const char* from, size_t count) {
  using V = Vectors<width>;
  const size_t whole = count / V::kNumbers * V::kNumbers;
  for (size_t i = 0; i < whole; i += V::kNumbers) {
    typename V::Floats numbers;
    std::memcpy(&numbers, from + 4 * i, width);
    const auto upper = __builtin_convertvector(Halves<width>::round(numbers) >> 16, typename V::Shorts);
    std::memcpy(to + 2 * i, &upper, sizeof(upper));
  }
  return whole;
}

template <size_t width>
CPULAUNCH_INLINE size_t widen_vectors(char* to, const char* from, size_t count) {
  using V = Vectors<width>;
  const size_t whole = count / V::kNumbers * V::kNumbers;
  for (size_t i = 0; i < whole; i += V::kNumbers) {
    typename V::Shorts upper;
    std::memcpy(&upper, from + 2 * i, sizeof(upper));
    const typename V::Words words = __builtin_convertvector(upper, typename V::Words) << 16;
    std::memcpy(to + 4 * i, &words, width);
  }
  return whole;
}

CPULAUNCH_VERSIONS(size_t sum_floats(char* to, const char* const* from, size_t sources, size_t bytes, int divisor),
                   (sum_blocks<Plain<float, Vectors<kWidth>::Floats>>(to, from, sources, bytes, divisor)))
CPULAUNCH_VERSIONS(size_t sum_doubles(char* to, const char* const* from, size_t sources, size_t bytes, int divisor),
                   (sum_blocks<Plain<double, Vectors<kWidth>::Doubles>>(to, from, sources, bytes, divisor)))
CPULAUNCH_VERSIONS(size_t sum_bfloat16s(char* to, const char* const* from, size_t sources, size_t bytes, int divisor),
                   (sum_blocks<Halves<kWidth>>(to, from, sources, bytes, divisor)))
CPULAUNCH_VERSIONS(size_t sum_float16s(char* to, const char* const* from, size_t sources, size_t bytes, int divisor),
                   (sum_blocks<Float16s<kWidth>>(to, from, sources, bytes, divisor)))

#ifdef __x86_64__

// Sums with the processor's float16 conversions.  They are separate functions, because code that the versions above
// share must not use instructions that a version lacks.  The results have the same bits as those of Float16.  For that,
// a NaN keeps its sign only.
#define CPULAUNCH_SUM_FLOAT16S(name, features, width, widen, narrow)                                                \
  __attribute__((target(features))) size_t name(char* to, const char* const* from, size_t sources, size_t bytes,    \
                                                int divisor) {                                                      \
    using V = Vectors<width>;                                                                                       \
    constexpr size_t kVectors = 4, kStep = width / 2;                                                               \
    const size_t blocks = bytes / (kVectors * kStep) * (kVectors * kStep);                                          \
    const auto by = Divisor<float>::by(divisor);                                                                    \
    V::Floats sums[kVectors];                                                                                       \
    V::Shorts numbers;                                                                                              \
    for (size_t at = 0; at < blocks; at += kVectors * kStep) {                                                      \
      for (size_t source = 0; source < sources; ++source) {                                                         \
        for (size_t i = 0; i < kVectors; ++i) {                                                                     \
          std::memcpy(&numbers, from[source] + at + i * kStep, kStep);                                              \
          sums[i] = source ? sums[i] + widen(numbers) : widen(numbers);                                             \
        }                                                                                                           \
      }                                                                                                             \
      for (size_t i = 0; i < kVectors; ++i) {                                                                       \
        if (divisor != 1) by.divide(sums[i]);                                                                       \
        const auto words = reinterpret_cast<V::Words>(sums[i]);                                                     \
        const V::Words rounded = sums[i] == sums[i] ? words : (words & 0x80000000u) | 0x7fc00000u;                  \
        numbers = narrow(rounded);                                                                                  \
        std::memcpy(to + at + i * kStep, &numbers, kStep);                                                          \
      }                                                                                                             \
    }                                                                                                               \
    return blocks;                                                                                                  \
  }
// (Masked intrinsics, because the plain ones start from an undefined value, for which g++ gives a warning.)
#define CPULAUNCH_WIDEN_512(numbers) (V::Floats) _mm512_maskz_cvtph_ps(0xffff, (__m256i)(numbers))
#define CPULAUNCH_NARROW_512(words) \
  (V::Shorts) _mm512_maskz_cvtps_ph(0xffff, (__m512)(words), _MM_FROUND_TO_NEAREST_INT)
#define CPULAUNCH_WIDEN_256(numbers) (V::Floats) _mm256_cvtph_ps((__m128i)(numbers))
#define CPULAUNCH_NARROW_256(words) (V::Shorts) _mm256_cvtps_ph((__m256)(words), _MM_FROUND_TO_NEAREST_INT)
CPULAUNCH_SUM_FLOAT16S(sum_float16s_by_512, "avx512f", 64, CPULAUNCH_WIDEN_512, CPULAUNCH_NARROW_512)
CPULAUNCH_SUM_FLOAT16S(sum_float16s_by_256, "avx2,f16c", 32, CPULAUNCH_WIDEN_256, CPULAUNCH_NARROW_256)

bool has_f16c() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

size_t sum_float16s_fast(char* to, const char* const* from, size_t sources, size_t bytes, int divisor) {
  static const bool by_512 = __builtin_cpu_supports("avx512f");
  static const bool by_256 = __builtin_cpu_supports("avx2") && has_f16c();
  if (by_512) return sum_float16s_by_512(to, from, sources, bytes, divisor);
  if (by_256) return sum_float16s_by_256(to, from, sources, bytes, divisor);
  return sum_float16s(to, from, sources, bytes, divisor);
}

#else

constexpr auto* sum_float16s_fast = sum_float16s;

#endif

CPULAUNCH_VERSIONS(size_t round_lines(char* to, const char* from, size_t count),
                   (round_vectors<kWidth>(to, from, count)))
CPULAUNCH_VERSIONS(size_t widen_lines(char* to, const char* from, size_t count),
                   (widen_vectors<kWidth>(to, from, count)))

// Sums whole blocks by `sum`, and the rest number by number.
template <class Number, size_t sum(char*, const char* const*, size_t, size_t, int)>
void sum_fast(char* to, const char* const* from, size_t sources, size_t bytes, int divisor) {
  const size_t blocks = sum(to, from, sources, bytes, divisor);
  reduce_range<Number, Reduction::sum>(to, from, sources, blocks, bytes, divisor);
}

template <class Number>
Reduce* reduce_for_number(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum: return reduce_any<Number, Reduction::sum>;
    case Reduction::product: return reduce_any<Number, Reduction::product>;
    case Reduction::min: return reduce_any<Number, Reduction::min>;
    case Reduction::max: return reduce_any<Number, Reduction::max>;
    default: break;
  }
  if constexpr (std::is_integral_v<Number>) {
    switch (reduction) {
      case Reduction::bit_and: return reduce_any<Number, Reduction::bit_and>;
      case Reduction::bit_or: return reduce_any<Number, Reduction::bit_or>;
      case Reduction::bit_xor: return reduce_any<Number, Reduction::bit_xor>;
      default: break;
    }
  }
  return nullptr;
}

}  // namespace

Reduce* reduce_for(NumberType type, Reduction reduction) {
  if (!has_reduction(type, reduction)) return nullptr;
  reduction = as_calculated(type, reduction);
  if (reduction == Reduction::sum) {
    if (type == NumberType::float32) return sum_fast<float, sum_floats>;
    if (type == NumberType::float64) return sum_fast<double, sum_doubles>;
    if (type == NumberType::float16) return sum_fast<Float16, sum_float16s_fast>;
    if (type == NumberType::bfloat16) return sum_fast<BFloat16, sum_bfloat16s>;
  }
  switch (type) {
    case NumberType::float64: return reduce_for_number<double>(reduction);
    case NumberType::float32: return reduce_for_number<float>(reduction);
    case NumberType::float16: return reduce_for_number<Float16>(reduction);
    case NumberType::bfloat16: return reduce_for_number<BFloat16>(reduction);
    case NumberType::int64: return reduce_for_number<int64_t>(reduction);
    case NumberType::int32: return reduce_for_number<int32_t>(reduction);
    case NumberType::int16: return reduce_for_number<int16_t>(reduction);
    case NumberType::int8: return reduce_for_number<int8_t>(reduction);
    case NumberType::uint64: return reduce_for_number<uint64_t>(reduction);
    case NumberType::uint32: return reduce_for_number<uint32_t>(reduction);
    case NumberType::uint16: return reduce_for_number<uint16_t>(reduction);
    case NumberType::uint8:
    case NumberType::boolean: return reduce_for_number<uint8_t>(reduction);
  }
  return nullptr;
}

void divide(char* data, size_t bytes, NumberType type, int divisor) {
  const PlainNumbers plain;
  const char* sum = data;
  reduce_for(type, Reduction::average)(data, &sum, 1, bytes, divisor);
}

void to_bfloat16(char* to, const char* from, size_t count) {
  for (size_t i = round_lines(to, from, count); i < count; ++i) {
    float number;
    std::memcpy(&number, from + 4 * i, 4);
    const auto rounded = BFloat16::narrow(number);
    std::memcpy(to + 2 * i, &rounded, 2);
  }
}

void from_bfloat16(char* to, const char* from, size_t count) {
  for (size_t i = widen_lines(to, from, count); i < count; ++i) {
    BFloat16 number;
    std::memcpy(&number, from + 2 * i, 2);
    const float wide = BFloat16::widen(number);
    std::memcpy(to + 4 * i, &wide, 4);
  }
}

}  // namespace cpulaunch
