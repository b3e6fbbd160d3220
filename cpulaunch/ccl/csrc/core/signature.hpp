// What a rank calls, as it tells the others.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "arithmetic.hpp"
#include "collective.hpp"
#include "members.hpp"
#include "transfer.hpp"

namespace cpulaunch {

// What a rank calls.  The ranks of a group have to call the same.
struct Signature {
  using Kind = cpulaunch::Kind;

  Kind kind;
  NumberType type = NumberType::uint8;
  Reduction reduction = Reduction::sum;
  Wire wire = Wire::exact;
  int32_t root = -1;
  uint64_t bytes = 0;     // of this operation's tensors; 0 where the ranks' sizes may differ
  uint64_t sequence = 0;  // how many operations came before
  uint64_t sizes = 0;     // tells lists of tensors of unlike sizes apart (digest_of)

  bool operator==(const Signature& other) const;
  bool operator!=(const Signature& other) const { return !(*this == other); }
  // What the sum over `ranks` ranks is divided by.
  int divisor(int ranks) const { return reduction == Reduction::average ? ranks : 1; }
  // It may have come over the network: no value is taken for granted.
  cl_call call(const Members& members) const;
  // What is wrong where `rank` calls this while this rank calls `own`.
  Mismatch mismatch(const Members& members, int rank, const Signature& own) const;
};

// 0 where all sizes are the same.
uint64_t digest_of(const std::vector<size_t>& sizes);

// What is wrong where `rank` sends `sent` bytes to this rank.
Mismatch mismatch_of_sizes(const Members& members, int rank, uint64_t sent, uint64_t expected);

}  // namespace cpulaunch
