// Pieces that come from other hosts to a slot, and from there to all ranks of the host.  Over a fabric, this also has
// what is under way.

#pragma once

#include <array>
#include <memory>
#include <vector>

#include "fabric.hpp"
#include "hierarchy.hpp"

namespace cpulaunch {

class SpreadPieces {
 public:
  using Transfers = std::vector<std::unique_ptr<Transfer>>;

  explicit SpreadPieces(Hierarchy& hierarchy) : hierarchy_(hierarchy), layout_(hierarchy.layout) {}

  // Where what is under way of a piece goes; there is none yet.
  Transfers& begin(Piece piece) {
    auto& state = states_[hierarchy_.index(piece)];
    state = {};
    return state.transfers;
  }

  // Whether all has come.
  bool is_here(Piece piece) const {
    const auto& transfers = states_[hierarchy_.index(piece)].transfers;
    return std::all_of(transfers.begin(), transfers.end(), [](const auto& each) { return each->test(); });
  }

  // Calls `copy` for this rank once all is here, and then, once they have their own, for each other local rank.  True
  // after that.
  template <class Copy>
  bool spread(Piece piece, const Copy& copy) {
    if (!is_here(piece)) return false;
    auto& state = states_[hierarchy_.index(piece)];
    if (!state.has_own) {
      copy(layout_.local);
      if (layout_.locals > 1) hierarchy_.set_mark(kMark, piece);
      state.has_own = true;
    }
    for (int local = 0; local < layout_.locals; ++local) {
      if (local != layout_.local && !hierarchy_.has_mark(kMark, local, piece)) return false;
    }
    for (int step = 1; step < layout_.locals; ++step) copy((layout_.local + step) % layout_.locals);
    return true;
  }

  // The slot of a local rank, or other memory where this one is alone on its host.
  char* of(int local, Piece piece, size_t bytes) const {
    return layout_.locals > 1 ? hierarchy_.slot(local, piece) : hierarchy_.staging(piece, bytes);
  }

 private:
  static constexpr Hierarchy::Mark kMark = &SharedSlots::Counters::everywhere;

  struct State {
    Transfers transfers;
    bool has_own = false;
  };

  Hierarchy& hierarchy_;
  const Layout& layout_;
  std::array<State, SharedSlots::kMaxSlots> states_;
};

}  // namespace cpulaunch
