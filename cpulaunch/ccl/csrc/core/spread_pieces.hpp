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
  Transfers& begin(uint64_t piece) {
    auto& state = states_[hierarchy_.index(piece)];
    state = {};
    return state.transfers;
  }

  // Whether all has come.
  bool is_here(uint64_t piece) const {
    const auto& transfers = states_[hierarchy_.index(piece)].transfers;
    return std::all_of(transfers.begin(), transfers.end(), [](const auto& each) { return each->test(); });
  }

  // Calls `take` for this rank once all is here, and then, once they have their own, for each other local rank.  True
  // after that.
  template <class Take>
  bool spread(uint64_t piece, const Take& take) {
    if (!is_here(piece)) return false;
    auto& state = states_[hierarchy_.index(piece)];
    if (!state.is_taken) {
      take(layout_.local);
      if (layout_.locals > 1) hierarchy_.set_mark(kMark, piece);
      state.is_taken = true;
    }
    for (int local = 0; local < layout_.locals; ++local) {
      if (local != layout_.local && !hierarchy_.has_mark(kMark, local, piece)) return false;
    }
    for (int step = 1; step < layout_.locals; ++step) take((layout_.local + step) % layout_.locals);
    return true;
  }

  // The slot of a local rank, or other memory where this one is alone on its host.
  char* of(int local, uint64_t piece, size_t bytes) const {
    return layout_.locals > 1 ? hierarchy_.slot(local, piece) : hierarchy_.staging(piece, bytes);
  }

 private:
  static constexpr Hierarchy::Mark kMark = &SharedSlots::Counters::everywhere;

  struct State {
    Transfers transfers;
    bool is_taken = false;
  };

  Hierarchy& hierarchy_;
  const Layout& layout_;
  std::array<State, SharedSlots::kMaxSlots> states_;
};

}  // namespace cpulaunch
