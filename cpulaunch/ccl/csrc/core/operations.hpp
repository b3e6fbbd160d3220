// The collective operations in pieces, and which of them each Kind of collective is.  Each family has a file,
// hierarchical_*.cpp.
//
// They read and write the memory that they are given until their transfer is done.  Sizes are in bytes.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "collective.hpp"
#include "hierarchy.hpp"

namespace cpulaunch {

// Parts of pieces are multiples of these sizes in bytes: the first for copies, the second for sums, whose loops handle
// that much at once.
constexpr size_t kCopyGranule = 64, kSumGranule = 256;

// Reduces `data` over all ranks, in place, as the signature says, whatever its kind.  In a reduce, only the root gets
// the result, and the other ranks' data is undefined.  With Wire::bfloat16, float32 sums are rounded if there are
// several hosts (host_exchange.hpp); other reductions are the same as with Wire::exact.  Data of 0 bytes is allowed,
// also in the functions below: the ranks still meet, and notice if one of them has data.
OperationPtr make_all_reduce(Hierarchy& hierarchy, char* data, Signature signature);

// `outputs` has an item for each rank.  This rank's input has the size of its output, and may be its output.
OperationPtr make_all_gather(Hierarchy& hierarchy, const char* input, Parts outputs);

// `inputs` has an item for each rank.  `output` becomes the reduction of all ranks' inputs for this rank.
OperationPtr make_reduce_scatter(Hierarchy& hierarchy, char* output, Parts inputs, NumberType type,
                                 Reduction reduction);

OperationPtr make_broadcast(Hierarchy& hierarchy, char* data, size_t bytes, int root);

// Each rank sends a part to each other rank.  Parts may be empty.
Operations make_all_to_all(Hierarchy& hierarchy, Parts sent, Parts received,
                           Signature signature = {Signature::Kind::all_to_all});

inline size_t size_of_all(const Parts& parts) {
  const auto add = [](size_t sum, const Part& part) { return sum + part.bytes; };
  return std::accumulate(parts.begin(), parts.end(), size_t{0}, add);
}

// Where each part begins in memory that holds all parts one after the other.
inline PooledVector<size_t> begins_of(const Parts& parts) {
  PooledVector<size_t> begins(parts.size());
  for (size_t rank = 1; rank < parts.size(); ++rank) begins[rank] = begins[rank - 1] + parts[rank - 1].bytes;
  return begins;
}

inline size_t size_of_longest(const Parts& parts) {
  size_t longest = 0;
  for (const auto& part : parts) longest = std::max(longest, part.bytes);
  return longest;
}

inline bool are_in_a_row(const Parts& parts) {
  const char* next = parts[0].data;
  for (const auto& part : parts) {
    if (part.data != next) return false;
    next += part.bytes;
  }
  return true;
}

// Returns the operations that carry out a collective, which must not be a message.
inline Operations operations_of(Hierarchy& hierarchy, const Collective& its) {
  const int size = hierarchy.layout.size;
  const auto only_root = [&](const Parts& part) {  // the only part goes to the root, or comes from it
    Parts parts(size);
    parts[its.root] = part[0];
    return parts;
  };
  const auto or_none = [&](const Parts& parts) { return parts.empty() ? Parts(size) : parts; };
  Signature signature{its.kind};
  signature.root = its.root;
  switch (its.kind) {
    case Kind::reduce:  // reduced in the output's memory, whose content only the root uses
      if (its.sent[0].data != its.received[0].data) {
        std::memcpy(its.received[0].data, its.sent[0].data, its.sent[0].bytes);
      }
      [[fallthrough]];
    case Kind::all_reduce:
    case Kind::barrier:
      signature = {its.kind, its.type, its.reduction, its.wire, its.root, its.received[0].bytes};
      return {make_all_reduce(hierarchy, its.received[0].data, signature)};
    case Kind::broadcast:
      return {make_broadcast(hierarchy, its.received[0].data, its.received[0].bytes, its.root)};
    case Kind::all_gather:
      return {make_all_gather(hierarchy, its.sent[0].data, its.received)};
    case Kind::reduce_scatter:
      return {make_reduce_scatter(hierarchy, its.received[0].data, its.sent, its.type, its.reduction)};
    case Kind::all_to_all: return make_all_to_all(hierarchy, its.sent, its.received, signature);
    case Kind::gather: return make_all_to_all(hierarchy, only_root(its.sent), or_none(its.received), signature);
    case Kind::scatter: return make_all_to_all(hierarchy, or_none(its.sent), only_root(its.received), signature);
    case Kind::send:
    case Kind::receive: break;
  }
  throw std::logic_error("an unknown collective");
}

}  // namespace cpulaunch
