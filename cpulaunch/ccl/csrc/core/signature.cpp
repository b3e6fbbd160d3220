#include "signature.hpp"

#include <algorithm>
#include <iterator>

namespace cpulaunch {

bool Signature::operator==(const Signature& other) const {
  return kind == other.kind && type == other.type && reduction == other.reduction && wire == other.wire &&
         root == other.root && bytes == other.bytes && sequence == other.sequence && sizes == other.sizes;
}

cl_call Signature::call(const Members& members) const {
  const auto number = static_cast<size_t>(kind);
  const KindFacts its = number < std::size(kKindFacts) ? kKindFacts[number] : KindFacts{"unknown"};
  cl_call call{};
  write_text(call.kind, its.name);
  if (its.reduces) write_text(call.reduction, name_of(reduction));
  if (its.reduces) write_text(call.type, name_of(type));
  call.bytes = its.has_size ? static_cast<int64_t>(bytes) : -1;
  call.root = its.has_root ? members.number_of(root) : -1;
  call.compressed = wire != Wire::exact;
  call.sequence = sequence;
  return call;
}

Mismatch Signature::mismatch(const Members& members, int rank, const Signature& own) const {
  auto alike = own;
  alike.sizes = sizes;
  Cause cause(CauseKind::calls_differ, members, rank);
  cause.theirs = call(members);
  cause.own = own.call(members);
  cause.parts_differ = alike == *this;
  return Mismatch(cause, own.sequence);
}

// FNV-1a over the sizes.
uint64_t digest_of(const Parts& parts) {
  const auto differ = [](const Part& one, const Part& next) { return one.bytes != next.bytes; };
  if (std::adjacent_find(parts.begin(), parts.end(), differ) == parts.end()) return 0;
  uint64_t digest = 0xcbf29ce484222325;
  for (const auto& part : parts) digest = (digest ^ part.bytes) * 0x100000001b3;
  return digest;
}

Mismatch mismatch_of_sizes(const Members& members, int rank, uint64_t sent, uint64_t expected) {
  Cause cause(CauseKind::sizes_differ, members, rank);
  cause.bytes = static_cast<int64_t>(sent);
  cause.expected = static_cast<int64_t>(expected);
  return Mismatch(cause);
}

}  // namespace cpulaunch
