// Pieces that come from other hosts to a slot, and from there to all ranks of the host.

#pragma once

#include <array>

#include "hierarchy.hpp"

namespace cpulaunch {

class SpreadPieces {
 public:
  explicit SpreadPieces(Hierarchy& hierarchy) : hierarchy_(hierarchy), layout_(hierarchy.layout) {}

  // Called when the whole piece is here.  Calls `copy` with this rank first and, once all local ranks have done that,
  // with each other local rank.  Returns true after that.
  template <class Copy>
  bool spread(Piece piece, const Copy& copy) {
    auto& has_own = has_own_[hierarchy_.index(piece)];
    if (!has_own) {
      copy(layout_.local);
      if (layout_.locals > 1) hierarchy_.set_mark(kMark, piece);
      has_own = true;
    }
    for (int local = 0; local < layout_.locals; ++local) {
      if (local != layout_.local && !hierarchy_.has_mark(kMark, local, piece)) return false;
    }
    for (int step = 1; step < layout_.locals; ++step) copy((layout_.local + step) % layout_.locals);
    return true;
  }

  // The slot of a local rank, or other memory if this rank is alone on its host.
  char* of(int local, Piece piece, size_t bytes) const {
    return layout_.locals > 1 ? hierarchy_.slot(local, piece) : hierarchy_.staging(piece, bytes);
  }

 private:
  static constexpr Hierarchy::Mark kMark = &SharedSlots::Counters::everywhere;

  Hierarchy& hierarchy_;
  const Layout& layout_;
  std::array<bool, SharedSlots::kMaxSlots> has_own_{};
};

}  // namespace cpulaunch
