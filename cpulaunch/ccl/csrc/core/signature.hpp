// Signatures of operations, by which the ranks detect that they call different ones.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "arithmetic.hpp"
#include "collective.hpp"
#include "members.hpp"
#include "transfer.hpp"

namespace cpulaunch {

// What a rank calls.  All ranks of a group must call the same.
struct Signature {
  using Kind = cpulaunch::Kind;

  Kind kind;
  NumberType type = NumberType::uint8;
  Reduction reduction = Reduction::sum;
  Wire wire = Wire::exact;
  int32_t root = -1;
  uint64_t bytes = 0;     // of this operation's tensors; 0 if the sizes may differ between ranks
  uint64_t sequence = 0;  // the number of operations before this one
  uint64_t sizes = 0;     // digest of the sizes in a list of tensors (digest_of)

  bool operator==(const Signature& other) const;
  bool operator!=(const Signature& other) const { return !(*this == other); }
  // The divisor of the sum over `ranks` ranks.
  int divisor(int ranks) const { return reduction == Reduction::average ? ranks : 1; }
  // Trusts none of its own values: the signature may have come over the network.
  cl_call call(const Members& members) const;
  // The error if `rank` calls this while this rank calls `own`.
  Mismatch mismatch(const Members& members, int rank, const Signature& own) const;
};

// 0 if all sizes are the same.
uint64_t digest_of(const Parts& parts);

// The error if `rank` sends `sent` bytes to this rank, which expects `expected`.
Mismatch mismatch_of_sizes(const Members& members, int rank, uint64_t sent, uint64_t expected);

}  // namespace cpulaunch
