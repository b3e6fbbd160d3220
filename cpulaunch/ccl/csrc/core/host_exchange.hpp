// Reduces memory among the hosts, in place, for one lane of a piece.
//
// The hosts form a grid, of one dimension where they are few.  For each dimension in turn, each host gets a share of
// the range from the others of its row and reduces that; then the shares go back the other way round.  So a host sends
// 2(H-1)/H times the range, which is the least possible, in as few messages as the grid allows.  Two hosts exchange the
// whole range at once, which is as many bytes; and so do more hosts where the range is so small that the number of
// messages decides.  All hosts get the same bits: a share is reduced in one place, or everywhere in the same order.
//
// Where no such grid has all hosts, a few are guests of rows of its first dimension.  A guest sends what it has to the
// hosts of its row, as these do, and gets the result from them, but no share to reduce.  So what a host sends more is a
// share for each guest of its row.
//
// Only the root's host needs the result of a reduce.  So each host sends its share there instead of back, and of two
// hosts the other one sends the whole range and gets nothing.  Where all hosts exchange a small range, they still do:
// it takes no more rounds, and each host compares what the others call.
//
// All that will come is asked for at the start, so that no message keeps others waiting behind it.  What comes back
// goes to where it belongs: a host sends a share back only after it has got this host's contribution to it.
//
// With Wire::bfloat16 the hosts exchange a copy of the range, of half its size: each host's sum is rounded to bfloat16,
// also in what it adds itself, and the sum of these, which is calculated in float32, is rounded once more in each
// dimension.  So all hosts get the same bits here, too, and which ones does not depend on how the range is shared out.

#pragma once

#include <array>

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
    int hosts, guests;  // the row's; after the first dimension, a guest has neither
    int own;            // this host's place among them: the guests' are the last ones
    int first, stride;  // the number of the row's first host, and what it is more with each place
    Range range;        // before, and after the shares have come back
    Range share;        // of this host
    char* staging;      // of this size for each other host

    int places() const { return hosts + guests; }
    bool is_guest(int place) const { return place >= hosts; }
  };
  // All hosts go through the same phases in the same order.
  struct Phase {
    enum class Kind {
      reduce,     // of a dimension: each host gets its share from the others of its row, and reduces it
      give_back,  // of a dimension: each host sends its share to the others of its row
      deliver,    // each host sends the root's host its share
      hand_out,   // where shares are whole, guests get the result from the first host of their row
    };

    Kind kind = Kind::reduce;
    size_t dimension = 0;
    int pending = 0;  // messages that are under way
  };

  // Without memory of its own.
  template <class T, size_t most>
  class Few {
   public:
    void add(const T& item) { items_.at(size_++) = item; }
    size_t size() const { return size_; }
    T& operator[](size_t index) { return items_[index]; }
    const T& operator[](size_t index) const { return items_[index]; }
    T& back() { return items_[size_ - 1]; }

   private:
    std::array<T, most> items_;
    size_t size_ = 0;
  };

  bool at_root() const { return root_host_ == hierarchy_->layout.host; }
  bool sends_only() const { return one_way_ && !at_root(); }

  void make_dimensions(char* staging);
  void make_phases();
  int rank_at(const Dimension& dimension, int place) const;
  // Nothing for guests.
  Range share_of(const Dimension& dimension, int place) const;
  Range last_share_of(int host) const;
  char* staging_for(const Dimension& dimension, int place) const;
  void receive(size_t phase, int from, char* to, size_t bytes);
  void send_to(size_t phase, int to, Range range);
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
  size_t bytes_ = 0;
  int root_host_ = -1;    // the only one that needs the result; -1: all do
  bool whole_ = false;    // the hosts exchange all instead of shares,
  bool one_way_ = false;  // or the other of two hosts sends all to the root's
  Few<Dimension, Layout::kMostDimensions> dimensions_;
  Few<Phase, 2 * Layout::kMostDimensions> phases_;
  size_t phase_ = 0;
};

}  // namespace cpulaunch
