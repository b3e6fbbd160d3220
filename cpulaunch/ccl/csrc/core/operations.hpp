// The collective operations in pieces: one file for each family, hierarchical_*.cpp, and fabric_*.cpp where they take
// other steps over a fabric.
//
// They read and write the memory that they are given until their transfer is done.  Sizes are in bytes.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "hierarchy.hpp"

namespace cpulaunch {

using OperationPtr = std::shared_ptr<Operation>;

// Parts of pieces are multiples of these, in bytes: of what is copied, and of what is summed, whose loops take as much.
constexpr size_t kCopyGranule = 64, kSumGranule = 256;

// `data` becomes the reduction over all ranks, in place, as the signature says, whichever its kind is.  With
// Wire::bfloat16, sums of float32 are rounded where there are several hosts (host_exchange.hpp); other reductions are
// as with Wire::exact.  Of no bytes, also by the functions below: the ranks meet, so that one that has some is found
// out; over a fabric those of a host do.
OperationPtr make_all_reduce(Hierarchy& hierarchy, char* data, Signature signature);

// `outputs` and `sizes` are of each rank; this rank's input has this rank's size, and may be its output.
OperationPtr make_all_gather(Hierarchy& hierarchy, const char* input, std::vector<char*> outputs,
                             std::vector<size_t> sizes);

// `output` becomes the reduction, over all ranks, of what they have for this rank among their `inputs`.
OperationPtr make_reduce_scatter(Hierarchy& hierarchy, char* output, std::vector<const char*> inputs,
                                 std::vector<size_t> sizes, NumberType type, Reduction reduction);

OperationPtr make_broadcast(Hierarchy& hierarchy, char* data, size_t bytes, int root);

// The ranks exchange what each has for each other one, which may be nothing.  These are two operations, to be started
// one after the other.
std::vector<OperationPtr> make_all_to_all(Hierarchy& hierarchy, std::vector<Part> sent, std::vector<Part> received,
                                          Signature signature = {Signature::Kind::all_to_all});

// Those that the functions above make where there is a fabric.
OperationPtr make_fabric_all_gather(Hierarchy& hierarchy, const Signature& signature, const char* input,
                                    std::vector<char*> outputs, std::vector<size_t> sizes);
OperationPtr make_fabric_reduce_scatter(Hierarchy& hierarchy, const Signature& signature, char* output,
                                        std::vector<const char*> inputs, std::vector<size_t> sizes);
OperationPtr make_fabric_broadcast(Hierarchy& hierarchy, const Signature& signature, char* data);

}  // namespace cpulaunch
