// The collective operations in pieces, and which of them each Kind of collective is.  Each family has a file,
// hierarchical_*.cpp.
//
// They read and write the memory that they are given until their transfer is done.  Sizes are in bytes.

#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "collective.hpp"
#include "hierarchy.hpp"

namespace cpulaunch {

using OperationPtr = std::shared_ptr<Operation>;

// Parts of pieces are multiples of these sizes in bytes: the first for copies, the second for sums, whose loops handle
// that much at once.
constexpr size_t kCopyGranule = 64, kSumGranule = 256;

// Reduces `data` over all ranks, in place, as the signature says, whatever its kind.  In a reduce, only the root gets
// the result, and the other ranks' data is undefined.  With Wire::bfloat16, float32 sums are rounded if there are
// several hosts (host_exchange.hpp); other reductions are the same as with Wire::exact.  Data of 0 bytes is allowed,
// also in the functions below: the ranks still meet, and notice if one of them has data.
OperationPtr make_all_reduce(Hierarchy& hierarchy, char* data, Signature signature);

// `outputs` and `sizes` have an item for each rank.  This rank's input has this rank's size, and may be its output.
OperationPtr make_all_gather(Hierarchy& hierarchy, const char* input, std::vector<char*> outputs,
                             std::vector<size_t> sizes);

// `output` becomes the reduction of all ranks' inputs for this rank.
OperationPtr make_reduce_scatter(Hierarchy& hierarchy, char* output, std::vector<const char*> inputs,
                                 std::vector<size_t> sizes, NumberType type, Reduction reduction);

OperationPtr make_broadcast(Hierarchy& hierarchy, char* data, size_t bytes, int root);

// Operations to start one after the other; `second` may be null.
struct Operations {
  OperationPtr first, second = nullptr;
};

// Each rank sends a part to each other rank.  Parts may be empty.
Operations make_all_to_all(Hierarchy& hierarchy, std::vector<Part> sent, std::vector<Part> received,
                           Signature signature = {Signature::Kind::all_to_all});

inline std::vector<size_t> sizes_of(const Parts& parts) {
  std::vector<size_t> sizes;
  for (const auto& part : parts) sizes.push_back(part.bytes);
  return sizes;
}

// Returns the offsets of adjacent parts of these sizes, from the beginning of the first part.
inline std::vector<size_t> begins_of(const std::vector<size_t>& sizes) {
  std::vector<size_t> begins(sizes.size());
  for (size_t i = 1; i < sizes.size(); ++i) begins[i] = begins[i - 1] + sizes[i - 1];
  return begins;
}

template <class Data>
bool are_in_a_row(const std::vector<Data>& parts, const std::vector<size_t>& begins) {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] != parts[0] + begins[i]) return false;
  }
  return true;
}

template <class Data>
std::vector<Data> data_of(const Parts& parts) {
  std::vector<Data> data;
  for (const auto& part : parts) data.push_back(part.data);
  return data;
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
      return {make_all_gather(hierarchy, its.sent[0].data, data_of<char*>(its.received), sizes_of(its.received))};
    case Kind::reduce_scatter:
      return {make_reduce_scatter(hierarchy, its.received[0].data, data_of<const char*>(its.sent), sizes_of(its.sent),
                                  its.type, its.reduction)};
    case Kind::all_to_all: return make_all_to_all(hierarchy, its.sent, its.received, signature);
    case Kind::gather: return make_all_to_all(hierarchy, only_root(its.sent), or_none(its.received), signature);
    case Kind::scatter: return make_all_to_all(hierarchy, or_none(its.sent), only_root(its.received), signature);
    case Kind::send:
    case Kind::receive: break;
  }
  throw std::logic_error("an unknown collective");
}

}  // namespace cpulaunch
