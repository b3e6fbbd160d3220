// Proofs that a peer belongs to the group: HMAC-SHA256 (RFC 2104, FIPS 180-4).

#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace cpulaunch {

using Proof = std::array<unsigned char, 32>;

// The proof for this text, which only a holder of the key can compute.
Proof prove(const std::string& key, const std::string& text);
// Takes the same time wherever they differ.
bool are_same(const Proof& a, const Proof& b);

}  // namespace cpulaunch
