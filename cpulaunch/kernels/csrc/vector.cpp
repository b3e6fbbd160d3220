// The loops of vector.hpp for one kind of vector unit, CPULAUNCH_VECTOR.  The compiler's flags must match it.
#include "vector.hpp"

#include "philox.hpp"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

namespace cpulaunch::kernels {
namespace {

inline float as_float(float value) { return value; }

inline float as_float(uint16_t bfloat16) {
  const uint32_t bits = uint32_t(bfloat16) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store(float value, float* to) { *to = value; }

// Rounds to the nearest, ties to even, as torch does.
inline void store(float value, uint16_t* to) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *to = value == value ? rounded : 0x7fc0;
}

// Multiplies by 0 to drop an element, so that NaN and infinity become NaN, as in torch.
template <typename T>
inline void drop(const T* from, T* to, int64_t count, const uint32_t* numbers, const Mask& mask) {
  for (int64_t i = 0; i < count; ++i)
    store(as_float(from[i]) * (numbers[i] >= mask.threshold ? mask.scale : 0.0f), to + i);
}

template <typename T>
void dropout(const T* from, T* to, int64_t begin, int64_t end, int64_t size, const Mask& shared) {
  const Mask mask = shared;  // a copy: the compiler then knows that the stores below don't change it
  alignas(64) uint32_t numbers[block_size];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t at = block * block_size, left = size - at;
    philox(mask.seed, block, numbers);
    if (left >= block_size)
      drop(from + at, to + at, block_size, numbers, mask);  // a constant count is faster
    else
      drop(from + at, to + at, left, numbers, mask);
  }
}

constexpr int accumulators = 16;  // of a sum or a maximum: they make a vector
constexpr float infinity = __builtin_inff();

// Adds the halves to each other again and again: one by one, each addition would wait for the one before.
inline float sum_of(float* numbers) {
  for (int half = accumulators / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) numbers[i] += numbers[i + half];
  return numbers[0];
}

inline float largest_of(float* numbers) {
  for (int half = accumulators / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) numbers[i] = numbers[i + half] > numbers[i] ? numbers[i + half] : numbers[i];
  return numbers[0];
}

// e^x within 2 ulp (the polynomial of Cephes' expf, on [-ln 2 / 2, ln 2 / 2]); 0 below -87.3.
inline float exponential(float x) {
  constexpr float to_nearest = 12582912.0f;  // 1.5 · 2^23; adding it leaves the nearest integer in the lowest bits
  const float shifted = x * 1.44269504f + to_nearest, power = shifted - to_nearest;
  const float rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  float value = 1.9875691500e-4f;
  value = value * rest + 1.3981999507e-3f;
  value = value * rest + 8.3334519073e-3f;
  value = value * rest + 4.1665795894e-2f;
  value = value * rest + 1.6666665459e-1f;
  value = value * rest + 5.0000001201e-1f;
  value = value * rest * rest + rest + 1.0f;
  uint32_t bits, exponent;
  memcpy(&bits, &value, sizeof bits);
  memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;
  memcpy(&value, &bits, sizeof value);
  return x < -87.3f ? 0.0f : x == x ? value : x;
}

inline float as_bias(float value) { return value; }
inline float as_bias(uint16_t bfloat16) { return as_float(bfloat16); }
inline float as_bias(uint8_t seen) { return seen ? 0.0f : -infinity; }

template <typename T>
void add_bias(const Bias& bias, int64_t query, int64_t keys, float* row) {
  const T* from = static_cast<const T*>(bias.data) + query * bias.by_query;
  if (bias.by_key == 1)
    for (int64_t key = 0; key < keys; ++key) row[key] += as_bias(from[key]);
  else
    for (int64_t key = 0; key < keys; ++key) row[key] += as_bias(from[key * bias.by_key]);
}

// Scales a row's scores, adds its bias, and sets the scores of keys that the query must not see to -infinity.
void finish_row(const Rows& rows, int64_t index, float* row) {
  const int64_t query = rows.first_query + index;
  const float scale = rows.scale;
  for (int64_t key = 0; key < rows.width; ++key) row[key] *= scale;
  if (rows.bias.kind == Bias::boolean) add_bias<uint8_t>(rows.bias, query, rows.keys, row);
  if (rows.bias.kind == Bias::fp32) add_bias<float>(rows.bias, query, rows.keys, row);
  if (rows.bias.kind == Bias::bf16) add_bias<uint16_t>(rows.bias, query, rows.keys, row);
  int64_t seen = rows.keys;
  if (rows.causal && query + 1 < seen) seen = query + 1;
  for (int64_t key = seen; key < rows.width; ++key) row[key] = -infinity;
}

void softmax(const Rows& rows, float* scores, float* factor, float* logsum) {
  const Mask mask = rows.mask;
  const int64_t width = rows.width;
  alignas(64) uint32_t numbers[block_size];
  uint64_t block = rows.first_block;
  for (int64_t index = 0; index < rows.count; ++index) {
    float* row = scores + index * width;
    finish_row(rows, index, row);
    float largest[accumulators], sum[accumulators];
    for (int i = 0; i < accumulators; ++i) largest[i] = row[i], sum[i] = 0;
    for (int64_t key = 0; key < width; key += accumulators)
      for (int i = 0; i < accumulators; ++i) largest[i] = row[key + i] > largest[i] ? row[key + i] : largest[i];
    float most = largest_of(largest);
    if (most == -infinity) most = 0;  // the query sees no key: all its probabilities become 0
    for (int64_t key = 0; key < width; key += block_size, ++block) {
      philox(mask.seed, block, numbers);
      for (int half = 0; half < block_size; half += accumulators)
        for (int i = 0; i < accumulators; ++i) {
          const float value = exponential(row[key + half + i] - most);
          sum[i] += value;
          row[key + half + i] = numbers[half + i] >= mask.threshold ? value : 0.0f;
        }
    }
    const float total = sum_of(sum);
    factor[index] = total == 0 ? 0 : mask.scale / total;
    logsum[index] = total == 0 ? infinity : most + __builtin_logf(total);
  }
}

void softmax_backward(const Rows& rows, float* scores, float* gradient, const float* logsum,
                      const float* inner) {
  const Mask mask = rows.mask;
  const float scale = rows.scale;
  const int64_t width = rows.width;
  alignas(64) uint32_t numbers[block_size];
  uint64_t block = rows.first_block;
  for (int64_t index = 0; index < rows.count; ++index) {
    float *row = scores + index * width, *of_row = gradient + index * width;
    finish_row(rows, index, row);
    const float log = logsum[index], shared = inner[index];
    for (int64_t key = 0; key < width; key += block_size, ++block) {
      philox(mask.seed, block, numbers);
      for (int i = 0; i < block_size; ++i) {
        const float probability = exponential(row[key + i] - log);
        const float kept = numbers[i] >= mask.threshold ? mask.scale : 0.0f;
        of_row[key + i] = probability * (kept * of_row[key + i] - shared) * scale;
        row[key + i] = probability * kept;
      }
    }
  }
}

template <typename T>
void scaled(const float* from, float factor, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(from[i] * factor, to + i);
}

template <typename T>
float inner(const T* one, const T* other, int64_t count) {
  float sum[accumulators] = {}, total = 0;
  int64_t at = 0;
  for (; at + accumulators <= count; at += accumulators)
    for (int i = 0; i < accumulators; ++i) sum[i] += as_float(one[at + i]) * as_float(other[at + i]);
  for (; at < count; ++at) total += as_float(one[at]) * as_float(other[at]);
  return total + sum_of(sum);
}

template <typename T>
inline void transpose_tile(const char* from, int64_t rows, int64_t stride, int64_t columns, T* to,
                           int64_t to_stride) {
  for (int64_t column = 0; column < columns; ++column)
    for (int64_t row = 0; row < rows; ++row)
      memcpy(to + column * to_stride + row, from + row * stride + column * sizeof(T), sizeof(T));
}

// Transposes 16 × 16 numbers of 32 bits.
inline void transpose_square(const char* from, int64_t stride, uint32_t* to) {
  transpose_tile(from, 16, stride, 16, to, 16);
}

// Transposes 32 × 32 numbers of 16 bits, as numbers of 32 bits: each is a pair from two rows.
inline void transpose_square(const char* from, int64_t stride, uint16_t* to) {
  alignas(64) uint32_t pairs[16 * 32], turned[32 * 16];
  for (int row = 0; row < 16; ++row) {
    uint16_t first[32], second[32];
    memcpy(first, from + 2 * row * stride, sizeof first);
    memcpy(second, from + (2 * row + 1) * stride, sizeof second);
    for (int i = 0; i < 32; ++i) pairs[32 * row + i] = first[i] | uint32_t(second[i]) << 16;
  }
  for (int half = 0; half < 2; ++half)
    transpose_tile(reinterpret_cast<const char*>(pairs + 16 * half), 16, 32 * sizeof(uint32_t), 16,
                   turned + 256 * half, 16);
  memcpy(to, turned, sizeof turned);
}

// Transposes by tiles, whose rows are whole cache lines of `to`.  Parts of lines would evict each other before the
// lines are complete, if the lines are a power of two apart.
template <typename T>
void transpose(const void* from, int64_t rows, int64_t stride, int64_t columns, T* to, int64_t to_stride) {
  constexpr int64_t side = 64 / sizeof(T);
  const char* start = static_cast<const char*>(from);
  alignas(64) T tile[side * side];
  for (int64_t row = 0; row < rows; row += side)
    for (int64_t column = 0; column < columns; column += side) {
      const char* corner = start + row * stride + column * sizeof(T);
      T* target = to + column * to_stride + row;
      if (row + side <= rows && column + side <= columns) {  // constant sizes are faster
        transpose_square(corner, stride, tile);
        for (int64_t i = 0; i < side; ++i) memcpy(target + i * to_stride, tile + i * side, sizeof(T) * side);
      } else {
        transpose_tile(corner, rows - row < side ? rows - row : side, stride,
                       columns - column < side ? columns - column : side, target, to_stride);
      }
    }
}

inline uint32_t as_bits(uint16_t value) { return value; }

inline uint32_t as_bits(float value) {
  uint16_t bits;
  store(value, &bits);
  return bits;
}

template <typename T>
void panels(const T* from, int64_t rows, int64_t stride, int64_t width, int64_t panel, uint16_t* to) {
  for (int64_t column = 0; column < width; column += panel)
    for (int64_t row = 0; row < rows; row += 2, to += 2 * panel) {
      const T *first = from + row * stride + column, *second = first + stride;
      uint32_t pairs[64];  // the widest panel
      if (row + 1 < rows)
        for (int64_t i = 0; i < panel; ++i) pairs[i] = as_bits(first[i]) | as_bits(second[i]) << 16;
      else
        for (int64_t i = 0; i < panel; ++i) pairs[i] = as_bits(first[i]);
      memcpy(to, pairs, 4 * panel);
    }
}

// gelu with tanh, and its derivative.
struct Gelu {
  float value, slope;
};

inline Gelu gelu_of(float number) {
  constexpr float twice = 1.59576912f, cubic = 0.044715f;  // 2 · sqrt(2 / pi)
  const float x = number < -10 ? -10 : number;  // gelu(-10) is -1e-37; further down, the exponential overflows
  const float square = x * x, factor = 1 / (1 + exponential(-twice * x * (1 + cubic * square)));
  return {x * factor, factor + x * factor * (1 - factor) * twice * (1 + 3 * cubic * square)};
}

template <typename T>
void gelu(const T* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(gelu_of(as_float(from[i])).value, to + i);
}

template <typename T>
void gelu_backward(const T* gradient, const T* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(as_float(gradient[i]) * gelu_of(as_float(from[i])).slope, to + i);
}

template <typename T>
Softmax softmax_of(const T* from, int64_t count) {
  constexpr int together = 4 * accumulators;
  float most[together], sum[together] = {}, whole = as_float(from[0]), total = 0;
  for (int i = 0; i < together; ++i) most[i] = whole;
  int64_t at = 0;
  for (; at + together <= count; at += together)
    for (int i = 0; i < together; ++i) most[i] = as_float(from[at + i]) > most[i] ? as_float(from[at + i]) : most[i];
  for (; at < count; ++at) whole = as_float(from[at]) > whole ? as_float(from[at]) : whole;
  for (int i = 0; i < together; ++i) whole = most[i] > whole ? most[i] : whole;
  for (at = 0; at + together <= count; at += together)
    for (int i = 0; i < together; ++i) sum[i] += exponential(as_float(from[at + i]) - whole);
  for (; at < count; ++at) total += exponential(as_float(from[at]) - whole);
  for (int i = 0; i < together; ++i) total += sum[i];
  return {whole, total};
}

// Writes a line of 64 bytes, bypassing the caches if the vector unit can do that.
inline void stream(const void* line, void* to) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(line));
#elif defined(__AVX2__)
  for (int half = 0; half < 2; ++half)
    _mm256_stream_si256(static_cast<__m256i*>(to) + half,
                        _mm256_load_si256(static_cast<const __m256i*>(line) + half));
#else
  memcpy(to, line, 64);
#endif
}

// Writes `count` elements, bypassing the caches.  `make(at, first, end, line)` fills elements `first` to `end` of the
// line that begins at element `at`, which is negative if the line begins before `to`.
template <typename T, typename Make>
inline void stream_all(T* to, int64_t count, const Make& make) {
  constexpr int64_t length = 64 / sizeof(T);
  alignas(64) T line[length];
  int64_t at = -int64_t(reinterpret_cast<uintptr_t>(to) % 64 / sizeof(T));
  for (; at < count; at += length) {
    if (at >= 0 && at + length <= count) {
      make(at, 0, length, line);
      stream(line, to + at);
    } else {
      const int64_t first = at < 0 ? -at : 0, end = count - at < length ? count - at : length;
      make(at, first, end, line);
      for (int64_t i = first; i < end; ++i) to[at + i] = line[i];
    }
  }
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

void widen(const uint16_t* from, float* to, int64_t count) {
  stream_all(to, count, [from](int64_t at, int64_t first, int64_t end, float* line) {
    if (end - first == 16)  // a constant count is faster
      for (int i = 0; i < 16; ++i) line[i] = as_float(from[at + i]);
    else
      for (int64_t i = first; i < end; ++i) line[i] = as_float(from[at + i]);
  });
}

template <typename T>
void probabilities(const T* from, Softmax softmax, float factor, int64_t chosen, T* to, int64_t count) {
  constexpr int64_t length = 64 / sizeof(T);
  const float largest = softmax.largest, scale = factor / softmax.sum;
  const float value = exponential(as_float(from[chosen]) - largest) * scale - factor;
  stream_all(to, count, [=](int64_t at, int64_t first, int64_t end, T* line) {
    if (end - first == length)
      for (int i = 0; i < length; ++i) store(exponential(as_float(from[at + i]) - largest) * scale, line + i);
    else
      for (int64_t i = first; i < end; ++i) store(exponential(as_float(from[at + i]) - largest) * scale, line + i);
  });
  store(value, to + chosen);
}

}  // namespace

const Vector CPULAUNCH_VECTOR = {TEXT(CPULAUNCH_VECTOR),
                                 dropout<float>,
                                 dropout<uint16_t>,
                                 softmax,
                                 softmax_backward,
                                 scaled<float>,
                                 scaled<uint16_t>,
                                 inner<float>,
                                 inner<uint16_t>,
                                 transpose<uint16_t>,
                                 transpose<uint32_t>,
                                 panels<float>,
                                 panels<uint16_t>,
                                 gelu<float>,
                                 gelu<uint16_t>,
                                 gelu_backward<float>,
                                 gelu_backward<uint16_t>,
                                 softmax_of<float>,
                                 softmax_of<uint16_t>,
                                 probabilities<float>,
                                 probabilities<uint16_t>,
                                 widen};

}  // namespace cpulaunch::kernels
