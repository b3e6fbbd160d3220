// Reduces memory among the hosts, in place, for one lane of a piece.
//
// The hosts form a grid, of one dimension where they are few.  For each dimension in turn, each host gets a share of
// the range from the others of its row and reduces that; then the shares go back the other way round.  So a host sends
// 2(H-1)/H times the range, which is the least possible, in as few messages as the grid allows.  Two hosts exchange the
// whole range at once, which is as many bytes; and so do more hosts where the range is so small that the number of
// messages decides.  All hosts get the same bits: a share is reduced in one place, or everywhere in the same order.
//
// All that will come is asked for at the start, so that no message keeps others waiting behind it.  What comes back
// goes to where it belongs: a host sends a share back only after it has got this host's contribution to it.
//
// With Wire::bfloat16 the hosts exchange a copy of the range, of half its size: each host's sum is rounded to bfloat16,
// also in what it adds itself, and the sum of these, which is calculated in float32, is rounded once more in each
// dimension.  So all hosts get the same bits here, too, and which ones does not depend on how the range is shared out.

#pragma once

#include "hierarchy.hpp"

namespace cpulaunch {

class HostExchange {
 public:
  static size_t staging_size(const Layout& layout, size_t bytes, Wire wire);

  HostExchange(Hierarchy& hierarchy, const Operation& operation, Piece piece, int lane);
  // `staging` is for what comes from other hosts, and for the copy.
  void start(char* data, size_t bytes, char* staging);
  // Goes on with what has come.  True when the whole range is reduced.
  bool progress();

 private:
  // The part of one dimension: a row of hosts, which reduce a range.
  struct Dimension {
    int hosts, own;        // the row's hosts, and this one's place among them
    int stride;            // between their numbers
    Range range;           // before, and after the shares have come back
    Range share;           // of this host
    char* staging;         // of this size for each other host
    int reducing, coming;  // messages of the two phases that are under way
  };

  bool reduces(size_t phase) const { return phase < dimensions_.size(); }
  Dimension& dimension_of(size_t phase) {
    return dimensions_[reduces(phase) ? phase : 2 * dimensions_.size() - 1 - phase];
  }
  int rank_at(const Dimension& dimension, int place) const;
  Range share_of(const Dimension& dimension, int place) const;
  char* staging_for(const Dimension& dimension, int place) const;
  void ask(size_t phase);
  void send(size_t phase);
  void reduce(const Dimension& dimension);

  Hierarchy* hierarchy_;
  const Operation* operation_;
  Piece piece_;
  int lane_;
  Reduce* reduce_;
  char* data_ = nullptr;  // what is exchanged
  char* wide_ = nullptr;  // where the numbers are float32; null where they are exchanged as they are
  bool whole_ = false;    // the hosts exchange all instead of shares
  std::vector<Dimension> dimensions_;
  size_t phase_ = 0;  // those that reduce, for each dimension, then those that bring shares back
  size_t phases_ = 0;
};

}  // namespace cpulaunch
