// A collective operation or a message on plain memory.

#pragma once

#include <cstddef>
#include <cstdint>

#include "arithmetic.hpp"
#include "pool.hpp"

namespace cpulaunch {

enum class Kind : uint32_t {
  all_reduce,
  reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  gather,
  scatter,
  barrier,
  send,
  receive
};

// What ranks compare about their calls, for the Kinds that all ranks call, in the order of Kind.
struct KindFacts {
  const char* name;
  bool reduces = false;
  bool has_size = false;  // the size is the same on all ranks
  bool has_root = false;
};
constexpr KindFacts kKindFacts[] = {
    {"all_reduce", true, true},
    {"reduce", true, true, true},
    {"reduce_scatter", true, true},
    {"all_gather", false, true},
    {"broadcast", false, true, true},
    {"all_to_all"},
    {"gather", false, false, true},
    {"scatter", false, false, true},
    {"barrier"},
};

// Memory for the data that goes to a rank or comes from it.  Null if no message is sent at all.
struct Part {
  char* data;
  size_t bytes;
};
using Parts = PooledVector<Part>;

// The caller keeps the memory, and does not change it, until the transfer is done.
//
//                       sent                  received
//   all_reduce, barrier                       one part, in place
//   reduce              one part              one part; only the root's gets the result
//   broadcast                                 one part, which the root has filled
//   all_gather          one part              one of each rank
//   reduce_scatter      one for each rank     one part
//   all_to_all          one for each rank     one of each rank
//   gather              one part              the root: one of each rank; else none
//   scatter             the root: one for     one part
//                       each rank; else none
//   send                one part
//   receive                                   one part
struct Collective {
  Kind kind;
  NumberType type = NumberType::uint8;     // of a reduction
  Reduction reduction = Reduction::sum;
  Wire wire = Wire::exact;                 // of an all_reduce
  int32_t root = -1;                       // of a message: the other rank, or kAnySource
  int32_t tag = 0;                         // of a message
  Parts sent, received;
  int32_t* source = nullptr;               // where to store the rank that sent a message

  static constexpr int32_t kAnySource = -1;
};

}  // namespace cpulaunch
