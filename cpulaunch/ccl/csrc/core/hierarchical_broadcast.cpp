#include "operations.hpp"

namespace cpulaunch {

namespace {

// How a tensor reaches all hosts, by its size.
enum class Route {
  chain,  // large tensors: each host sends all data to the next host
  tree,   // small tensors: a binomial tree.  The path is shorter, but the root sends each byte several times
  deal,   // medium tensors on many hosts: the root sends a part to each host, which sends it to all others
};

// The hosts form a chain if there are this many pieces for each host.
constexpr size_t kPiecesForChain = 2;
// Up to this many hosts, the root of a tree sends each byte at most twice, so dealing would not pay off.
constexpr int kMostHostsOfTree = 4;
// The tensor is dealt out if each host gets at least this many bytes of a lane.
constexpr size_t kLeastDealt = 16 << 10;
// The most bytes of a lane's part of a piece if hosts pass pieces on: smaller pieces reach the last host sooner.
constexpr size_t kMaxPart = 128 << 10;

// On the root's host, the ranks take each piece from the root's slot.  Each rank then sends its lane's part to the next
// hosts, or deals it out to all.  A rank that has received its whole part puts it into its slot for the others.
class Broadcast final : public Operation {
 public:
  Broadcast(Hierarchy& hierarchy, const Signature& signature, char* data)
      : Operation(signature, piece_size(hierarchy, signature.bytes)),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        data_(data),
        bytes_(signature.bytes),
        root_(signature.root),
        route_(route_of(hierarchy, signature.bytes)),
        at_root_(layout_.host_numbers[root_] == layout_.host),
        copy_(layout_.hosts == 1 ? bytes_ : 0, layout_.large) {  // with other hosts, data is sent on: keep it in caches
    own_ = (layout_.host - layout_.host_numbers[root_] + layout_.hosts) % layout_.hosts;
    if (route_ == Route::tree) {
      while (reach_ < layout_.hosts && (own_ & reach_) == 0) reach_ *= 2;
    }
  }

  uint64_t pieces() const override { return (bytes_ + piece_bytes - 1) / piece_bytes; }

  void enter(Piece piece) override {
    entered_ = piece;
    if (at_root_) return;
    const auto index = hierarchy_.index(piece);
    if (route_ == Route::deal) ++to_pass_on_;
    for_each_lane(piece, layout_.local, [&](int lane, Range range) {
      if (route_ != Route::deal) {
        receive(piece, lane, own_ - reach_, range, receiving_[index]);
        return;
      }
      receive(piece, lane, 0, part_of_host(range, own_), dealt_[index]);
      for (int host = 1; host < layout_.hosts; ++host) {
        if (host != own_) receive(piece, lane, host, part_of_host(range, host), receiving_[index]);
      }
    });
  }

  bool can_put(Piece piece) override {
    pass_parts_on();
    const bool has_passed_on = piece + to_pass_on_ <= entered_;
    return has_passed_on && receiving_[hierarchy_.index(piece)] == 0;
  }

  void put(Piece piece) override {
    if (layout_.rank == root_ || (!at_root_ && route_ != Route::deal)) send_on(piece);
    if (layout_.locals == 1) return;
    const auto whole = range_of(piece);
    char* slot = hierarchy_.slot(layout_.local, piece) - whole.begin;
    auto& batch = hierarchy_.batch();
    if (layout_.rank == root_) {
      batch.copy(slot + whole.begin, data_ + whole.begin, whole.size());
    } else if (!at_root_) {
      for_each_lane(piece, layout_.local, [&](int, Range range) {
        batch.copy(slot + range.begin, data_ + range.begin, range.size());
      });
    }
    batch.run();
  }

  void take(Piece piece) override {
    if (layout_.rank == root_) return;
    auto& batch = hierarchy_.batch();
    if (at_root_) {
      const int local = layout_.local_numbers[root_];
      batch.copy(data_ + piece * piece_bytes, hierarchy_.slot(local, piece), range_of(piece).size(), copy_);
      batch.run();
      send_on(piece);
      return;
    }
    for (int local = 0; local < layout_.locals; ++local) {
      if (local == layout_.local) continue;
      const char* slot = hierarchy_.slot(local, piece) - piece * piece_bytes;
      for_each_lane(piece, local, [&](int, Range range) {
        batch.copy(data_ + range.begin, slot + range.begin, range.size(), copy_);
      });
    }
    batch.run();
  }

  bool is_drained() override { return sending_ == 0; }

 private:
  // The size of pieces that hosts pass on.
  static size_t size_to_pass_on(const Hierarchy& hierarchy) {
    return std::min(hierarchy.shape.slot_size, hierarchy.layout.lanes * kMaxPart);
  }

  static Route route_of(const Hierarchy& hierarchy, size_t bytes) {
    const auto& layout = hierarchy.layout;
    const size_t piece = size_to_pass_on(hierarchy);
    if ((bytes + piece - 1) / piece >= kPiecesForChain * layout.hosts) return Route::chain;
    const bool has_many = layout.hosts > kMostHostsOfTree;
    return has_many && bytes >= kLeastDealt * layout.lanes * (layout.hosts - 1) ? Route::deal : Route::tree;
  }

  // The tensor is one piece if there are two hosts with one rank each: nothing is passed on.
  static size_t piece_size(const Hierarchy& hierarchy, size_t bytes) {
    const auto& layout = hierarchy.layout;
    if (layout.hosts > 2 && route_of(hierarchy, bytes) != Route::deal) return size_to_pass_on(hierarchy);
    return layout.lanes == 1 && layout.hosts == 2 ? bytes : hierarchy.shape.slot_size;
  }

  Range range_of(Piece piece) const { return {piece * piece_bytes, std::min(bytes_, (piece + 1) * piece_bytes)}; }

  // The rank that handles a lane on a host.  Hosts are counted from the root's host.
  int rank_at(int host, int lane) const {
    return layout_.rank_with(lane, (layout_.host_numbers[root_] + host) % layout_.hosts);
  }

  template <class Act>
  void for_each_lane(Piece piece, int local, const Act& act) const {
    layout_.for_each_lane(local, [&](int lane) {
      const auto range = part_of(range_of(piece), lane, layout_.lanes, kCopyGranule);
      if (range.size()) act(lane, range);
    });
  }

  // The part of a lane's range that a host is dealt.  The root's host is dealt nothing.
  Range part_of_host(Range range, int host) const {
    return part_of(range, host - 1, layout_.hosts - 1, kCopyGranule);
  }

  // No message is sent for an empty range, and both sides know that.
  void receive(Piece piece, int lane, int host, Range range, int& count) {
    if (range.size() == 0) return;
    hierarchy_.network().receive(rank_at(host, lane), hierarchy_.tag(*this, piece, 0, lane), signature,
                                 data_ + range.begin, range.size(), count);
  }

  void send(Piece piece, int lane, int host, Range range) {
    if (range.size() == 0) return;
    hierarchy_.network().send(rank_at(host, lane), hierarchy_.tag(*this, piece, 0, lane), signature,
                              data_ + range.begin, range.size(), sending_, piece + 1 < pieces());
  }

  // Calls `act` with the hosts to which this one sends everything: the one with the most hosts behind it first.
  template <class Act>
  void for_each_child(const Act& act) const {
    if (route_ == Route::chain && own_ + 1 < layout_.hosts) act(own_ + 1);
    for (int step = reach_ / 2; step > 0; step /= 2) {
      if (own_ + step < layout_.hosts) act(own_ + step);
    }
  }

  void send_on(Piece piece) {
    for_each_lane(piece, layout_.local, [&](int lane, Range range) {
      for_each_child([&](int child) { send(piece, lane, child, range); });
      for (int host = 1; route_ == Route::deal && host < layout_.hosts; ++host) {
        send(piece, lane, host, part_of_host(range, host));
      }
    });
  }

  // Sends the other hosts the parts that this host has been dealt.
  void pass_parts_on() {
    for (; to_pass_on_ > 0; --to_pass_on_) {
      const auto piece = entered_.before(to_pass_on_ - 1);
      if (dealt_[hierarchy_.index(piece)] > 0) return;
      for_each_lane(piece, layout_.local, [&](int lane, Range range) {
        for (int step = 1; step < layout_.hosts; ++step) {  // each host begins with a different one
          const int host = (own_ + step) % layout_.hosts;
          if (host != 0) send(piece, lane, host, part_of_host(range, own_));
        }
      });
    }
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  char* const data_;
  const size_t bytes_;
  const int root_;
  const Route route_;
  const bool at_root_;
  const Copy copy_;
  int own_ = 0;  // this host's number, counted from the root's
  int reach_ = 1;  // how far the parent is.  In a tree, this is the lowest bit that is set in this host's number
  std::array<int, SharedSlots::kMaxSlots> dealt_{}, receiving_{};  // number of messages still to come, for each piece
  Piece entered_{};          // the last one
  uint64_t to_pass_on_ = 0;  // how many of the pieces up to that one still have their dealt part to be passed on
  int sending_ = 0;
};

}  // namespace

OperationPtr make_broadcast(Hierarchy& hierarchy, char* data, size_t bytes, int root) {
  const Signature signature{Signature::Kind::broadcast, NumberType::uint8, Reduction::sum, Wire::exact, root, bytes};
  if (bytes == 0) return make_all_reduce(hierarchy, nullptr, signature);
  return make_pooled<Broadcast>(hierarchy, signature, data);
}

}  // namespace cpulaunch
