// Reduces memory among the hosts, in place, for one lane of a piece.
//
// The hosts form a grid, which has one dimension if they are few.  For each dimension in turn, each host receives its
// share of the range from the others of its row and reduces it.  Then the shares go back in the reverse order.  So a
// host sends 2(H-1)/H times the range, which is the least possible, in as few messages as the grid allows.  Two hosts
// exchange the whole range at once, which takes the same number of bytes.  More hosts do that, too, if the range is so
// small that the number of messages matters more than their size.  All hosts get the same bits, because a share is
// reduced either in one place or everywhere in the same order.
//
// If the number of hosts has a large prime factor, a few hosts are outside of the grid, as guests of rows of its first
// dimension.  A guest sends its data to the hosts of its row, as they do to each other.  It gets the result from them,
// but reduces no share.  So a host sends one more share for each guest of its row.
//
// Only the root's host needs the result of a reduce, so the hosts send their shares there instead of back.  If there
// are only two hosts, the root's host receives the whole range and sends nothing.  But if the hosts exchange the whole
// range because it is small, they do that for a reduce, too: it takes no more rounds, and each host can compare its
// call with those of the others.
//
// All receives are posted at the start, so that no message delays those behind it.  Shares that come back are received
// in place: a host sends one back only after it has received this host's contribution to it.
//
// With Wire::bfloat16, the hosts exchange a copy of the range that has half its size.  Each host's sum is rounded to
// bfloat16, even when the host itself adds it.  The rounded sums are added in float32, and the result is rounded again
// in each dimension.  So all hosts get the same bits here, too, and the bits do not depend on how the range is split
// into shares.

#pragma once

#include <array>

#include "hierarchy.hpp"

namespace cpulaunch {

class HostExchange {
 public:
  static size_t staging_size(const Layout& layout, size_t bytes, Wire wire);

  HostExchange(Hierarchy& hierarchy, const Operation& operation, Piece piece, int lane);
  // `staging` is memory for the data of other hosts, and for the rounded copy.
  void start(char* data, size_t bytes, char* staging);
  // Continues with the messages that have arrived.  Returns true when the whole range is reduced.
  bool progress();

 private:
  // One dimension: this host's row, and the range that the hosts of the row reduce.
  struct Dimension {
    int hosts, guests;  // in the row; after the first dimension, a guest's row is empty
    int own;            // this host's place in the row; the guests have the last places
    int first, stride;  // the number of the row's first host, and the difference from each place to the next
    Range range;        // what the row reduces, and has again once the shares have come back
    Range share;        // this host's part of it
    char* staging;      // memory for a share from each other host

    int places() const { return hosts + guests; }
    bool is_guest(int place) const { return place >= hosts; }
  };
  // All hosts go through the same phases in the same order.
  struct Phase {
    enum class Kind {
      reduce,     // in one dimension: each host receives its share from the others of its row, and reduces it
      give_back,  // in one dimension: each host sends its share to the others of its row
      deliver,    // each host sends its share to the root's host
      hand_out,   // if hosts exchange the whole range: the first host of a row sends the result to the row's guests
    };

    Kind kind = Kind::reduce;
    size_t dimension = 0;
    int pending = 0;  // number of messages in flight
  };

  // A vector of at most `most` items, which allocates nothing.
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
  // Empty for guests.
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
  char* data_ = nullptr;  // the numbers that are exchanged
  char* wide_ = nullptr;  // the float32 originals if `data_` is rounded; else null
  size_t bytes_ = 0;
  int root_host_ = -1;    // the only host that needs the result; -1: all do
  bool whole_ = false;    // the hosts exchange the whole range instead of shares
  bool one_way_ = false;  // only the host without the root sends
  Few<Dimension, Layout::kMostDimensions> dimensions_;
  Few<Phase, 2 * Layout::kMostDimensions> phases_;
  size_t phase_ = 0;
};

}  // namespace cpulaunch
