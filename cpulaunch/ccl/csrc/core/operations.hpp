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

// Parts of pieces are multiples of these, in bytes: of what is copied, and of what is summed, whose loops take as much.
constexpr size_t kCopyGranule = 64, kSumGranule = 256;

// `data` becomes the reduction over all ranks, in place, as the signature says, whichever its kind is.  In a reduce,
// only the root gets it, and the data of the other ranks is undefined.  With Wire::bfloat16, sums of float32 are
// rounded where there are several hosts (host_exchange.hpp); other reductions are as with Wire::exact.  Of no bytes,
// also by the functions below: the ranks meet, so that one that has some is found out.
OperationPtr make_all_reduce(Hierarchy& hierarchy, char* data, Signature signature);

// `outputs` and `sizes` are of each rank; this rank's input has this rank's size, and may be its output.
OperationPtr make_all_gather(Hierarchy& hierarchy, const char* input, std::vector<char*> outputs,
                             std::vector<size_t> sizes);

// `output` becomes the reduction, over all ranks, of what they have for this rank among their `inputs`.
OperationPtr make_reduce_scatter(Hierarchy& hierarchy, char* output, std::vector<const char*> inputs,
                                 std::vector<size_t> sizes, NumberType type, Reduction reduction);

OperationPtr make_broadcast(Hierarchy& hierarchy, char* data, size_t bytes, int root);

// To be started one after the other; `second` may be null.
struct Operations {
  OperationPtr first, second = nullptr;
};

// The ranks exchange what each has for each other one, which may be nothing.
Operations make_all_to_all(Hierarchy& hierarchy, std::vector<Part> sent, std::vector<Part> received,
                           Signature signature = {Signature::Kind::all_to_all});

inline std::vector<size_t> sizes_of(const Parts& parts) {
  std::vector<size_t> sizes;
  for (const auto& part : parts) sizes.push_back(part.bytes);
  return sizes;
}

// Where parts of these sizes begin that are side by side, from the beginning of the first one.
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

// What a collective other than a message is.
inline Operations operations_of(Hierarchy& hierarchy, const Collective& its) {
  const int size = hierarchy.layout.size;
  const auto only_root = [&](const Parts& part) {  // what goes to one rank, or comes from it
    Parts parts(size);
    parts[its.root] = part[0];
    return parts;
  };
  const auto or_none = [&](const Parts& parts) { return parts.empty() ? Parts(size) : parts; };
  Signature signature{its.kind};
  signature.root = its.root;
  switch (its.kind) {
    case Kind::reduce:  // in memory that all but the root throw away
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
