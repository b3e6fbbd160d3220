#include "proof.hpp"

#include <cstdint>

namespace cpulaunch {

namespace {

constexpr size_t kHashedBlock = 64;  // bytes

// The fractions of the cube roots of the first 64 primes.
constexpr uint32_t kRoots[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t rotated(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

void hash_block(std::array<uint32_t, 8>& state, const unsigned char* block) {
  uint32_t words[64];
  for (int i = 0; i < 16; ++i) {
    words[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 | uint32_t{block[4 * i + 2]} << 8 |
               block[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t before = words[i - 15], last = words[i - 2];
    words[i] = words[i - 16] + (rotated(before, 7) ^ rotated(before, 18) ^ before >> 3) + words[i - 7] +
               (rotated(last, 17) ^ rotated(last, 19) ^ last >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int i = 0; i < 64; ++i) {
    const uint32_t first = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + kRoots[i] +
                           words[i];
    const uint32_t second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const uint32_t mixed[] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) state[i] += mixed[i];
}

Proof hash(std::string text) {
  std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const uint64_t bits = uint64_t{text.size()} * 8;
  text += static_cast<char>(0x80);
  text.resize((text.size() + 8 + kHashedBlock - 1) / kHashedBlock * kHashedBlock - 8);
  for (int shift = 56; shift >= 0; shift -= 8) text += static_cast<char>(bits >> shift & 0xff);
  for (size_t begin = 0; begin < text.size(); begin += kHashedBlock) {
    hash_block(state, reinterpret_cast<const unsigned char*>(text.data()) + begin);
  }
  Proof digest{};
  for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<unsigned char>(state[i / 4] >> (24 - i % 4 * 8));
  return digest;
}

std::string as_text(const Proof& digest) { return {digest.begin(), digest.end()}; }

std::string with_each(std::string block, unsigned char mask) {
  for (char& each : block) each = static_cast<char>(each ^ mask);
  return block;
}

}  // namespace

Proof prove(const std::string& key, const std::string& text) {
  std::string block = key.size() > kHashedBlock ? as_text(hash(key)) : key;
  block.resize(kHashedBlock);
  return hash(with_each(block, 0x5c) + as_text(hash(with_each(block, 0x36) + text)));
}

bool are_same(const Proof& a, const Proof& b) {
  unsigned differences = 0;
  for (size_t i = 0; i < a.size(); ++i) differences |= a[i] ^ b[i];
  return differences == 0;
}

}  // namespace cpulaunch
