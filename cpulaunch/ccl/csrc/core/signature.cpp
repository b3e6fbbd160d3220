#include "signature.hpp"

#include <algorithm>
#include <functional>
#include <iterator>

namespace cpulaunch {

namespace {

// How a signature of each Kind reads.
struct Call {
  const char* name;
  bool reduces = false, has_size = false;  // the same on all ranks
  const char* before_root = nullptr;
};

constexpr Call kCalls[] = {
    {"all_reduce", true, true},
    {"reduce", true, true, " to rank "},
    {"reduce_scatter", true, true},
    {"all_gather", false, true},
    {"broadcast", false, true, " from rank "},
    {"all_to_all"},
    {"gather", false, false, " to rank "},
    {"scatter", false, false, " from rank "},
    {"barrier"},
};

}  // namespace

std::string in_bytes(uint64_t count) { return std::to_string(count) + (count == 1 ? " byte" : " bytes"); }

bool Signature::operator==(const Signature& other) const {
  return kind == other.kind && type == other.type && reduction == other.reduction && wire == other.wire &&
         root == other.root && bytes == other.bytes && sequence == other.sequence && sizes == other.sizes;
}

std::string Signature::text(const Members& members) const {
  const auto number = static_cast<size_t>(kind);
  const Call call = number < std::size(kCalls) ? kCalls[number] : Call{"unknown"};
  std::string text = call.name;
  if (call.reduces) text += std::string(" (") + name_of(reduction) + ")";
  if (call.has_size) text += " of " + in_bytes(bytes);
  if (call.reduces) text += std::string(" ") + name_of(type);
  if (wire != Wire::exact) text += ", sent between hosts as bfloat16";
  if (call.before_root) text += call.before_root + std::to_string(members.number_of(root));
  return text;
}

Mismatch Signature::mismatch(const Members& members, int rank, const Signature& own) const {
  auto alike = own;
  alike.sizes = sizes;
  if (alike == *this) {
    return Mismatch(members.name(rank) + " calls " + text(members) + " in parts of other sizes than this rank",
                    own.sequence);
  }
  const char* when = sequence < own.sequence ? " as an earlier operation" : " as a later operation";
  return Mismatch(members.name(rank) + " calls " + text(members) + (sequence == own.sequence ? "" : when) +
                  ", this rank " + own.text(members), own.sequence);
}

// FNV-1a over the numbers.
uint64_t digest_of(const std::vector<size_t>& sizes) {
  if (std::adjacent_find(sizes.begin(), sizes.end(), std::not_equal_to<>()) == sizes.end()) return 0;
  uint64_t digest = 0xcbf29ce484222325;
  for (const auto size : sizes) digest = (digest ^ size) * 0x100000001b3;
  return digest;
}

Mismatch mismatch_of_sizes(const Members& members, int rank, uint64_t sent, uint64_t expected) {
  return Mismatch(members.name(rank) + " sends " + in_bytes(sent) + " to this rank, which expects " +
                  std::to_string(expected));
}

}  // namespace cpulaunch
