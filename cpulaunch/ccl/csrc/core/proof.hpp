// Proofs that who connects is of the group: HMAC-SHA256 (RFC 2104, FIPS 180-4).

#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace cpulaunch {

using Proof = std::array<unsigned char, 32>;

// What only a holder of the key can say about this text.
Proof prove(const std::string& key, const std::string& text);
// Takes as long wherever they differ.
bool are_same(const Proof& a, const Proof& b);

}  // namespace cpulaunch
