// Philox4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11):
// random numbers that are a function of a seed and a counter.  According to that paper it passes all tests of BigCrush.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int lanes = 8;
#elif defined(__AVX2__)
constexpr int lanes = 4;
#else
constexpr int lanes = 2;
#endif

// A 32-bit number in the lower half of each lane.  The upper halves are ignored.
typedef uint64_t Lanes __attribute__((vector_size(8 * lanes)));

// The 64-bit products.
inline Lanes product(Lanes numbers, uint32_t factor) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_mul_epu32((__m512i)numbers, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (Lanes)_mm256_mul_epu32((__m256i)numbers, _mm256_set1_epi64x(factor));
#else
  return (numbers & 0xffffffffu) * factor;
#endif
}

// Computes the 32 random numbers of a block, from 8 counters with 4 words each.  Number 2·c + w is word w of counter c,
// and number 16 + 2·c + w is its word 2 + w, for w of 0 and 1.  That is the order of 64-bit lanes in memory.
inline void philox(uint64_t seed, uint64_t block, uint32_t* numbers) {
  constexpr int rounds = 7;
  for (int first = 0; first < 8; first += lanes) {
    Lanes x0;
    for (int lane = 0; lane < lanes; ++lane) x0[lane] = 8 * block + first + lane;
    Lanes x1 = x0 >> 32, x2 = {}, x3 = {};
    uint32_t key0 = seed, key1 = seed >> 32;
    for (int round = 0; round < rounds; ++round) {
      const Lanes p0 = product(x0, 0xD2511F53u), p1 = product(x2, 0xCD9E8D57u);
      x0 = (p1 >> 32) ^ x1 ^ key0;
      x1 = p1;
      x2 = (p0 >> 32) ^ x3 ^ key1;
      x3 = p0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    const Lanes low = (x0 & 0xffffffffu) | (x1 << 32), high = (x2 & 0xffffffffu) | (x3 << 32);
    memcpy(numbers + 2 * first, &low, sizeof low);
    memcpy(numbers + 16 + 2 * first, &high, sizeof high);
  }
}

}  // namespace
