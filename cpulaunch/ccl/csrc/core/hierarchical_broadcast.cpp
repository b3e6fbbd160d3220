#include "operations.hpp"

namespace cpulaunch {

namespace {

// With this many pieces for each host, the hosts form a chain, in which each sends the data once; with fewer, a tree,
// whose way is shorter.
constexpr size_t kPiecesForChain = 2;
// Bytes of a lane's part of a piece, where hosts pass it on: the last one gets smaller ones sooner.
constexpr size_t kMaxPart = 128 << 10;

// On the root's host, the ranks take pieces from the root's slot.  Each then sends its lane's part to the next hosts,
// where it goes to a slot for the others.
class Broadcast final : public Operation {
 public:
  Broadcast(Hierarchy& hierarchy, const Signature& signature, char* data)
      : Operation(signature, piece_size(hierarchy, signature.bytes)),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        data_(data),
        bytes_(signature.bytes),
        root_(signature.root),
        at_root_(layout_.host_numbers[root_] == layout_.host),
        copy_(layout_.hosts == 1 ? bytes_ : 0, layout_.large) {  // what has come is sent on
    // Its number counted from the root's host.
    const int host = (layout_.host - layout_.host_numbers[root_] + layout_.hosts) % layout_.hosts;
    if (pieces() >= kPiecesForChain * layout_.hosts) {
      parent_ = host - 1;
      if (host + 1 < layout_.hosts) children_.push_back(host + 1);
    } else {  // binomial: the parent's number is this host's without its lowest bit
      int bit = 1;
      for (; bit < layout_.hosts && (host & bit) == 0; bit *= 2) {
        if (host + bit < layout_.hosts) children_.insert(children_.begin(), host + bit);
      }
      parent_ = host & ~bit;
    }
  }

  uint64_t pieces() const override { return (bytes_ + piece_bytes - 1) / piece_bytes; }

  void enter(Piece piece) override {
    if (at_root_) return;
    for_each_lane(piece, layout_.local, [&](int lane, Range range) {
      hierarchy_.network().receive(rank_at(parent_, lane), hierarchy_.tag(*this, piece, 0, lane), signature,
                                   data_ + range.begin, range.size(), receiving_[hierarchy_.index(piece)]);
    });
  }

  bool can_put(Piece piece) override { return receiving_[hierarchy_.index(piece)] == 0; }

  void put(Piece piece) override {
    if (layout_.rank == root_ || !at_root_) send_on(piece);
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
  // Where a rank has neither local ranks nor a host to pass it on to, the tensor is one piece.
  static size_t piece_size(const Hierarchy& hierarchy, size_t bytes) {
    const auto& layout = hierarchy.layout;
    if (layout.hosts > 2) return std::min(hierarchy.shape.slot_size, layout.lanes * kMaxPart);
    return layout.lanes == 1 && layout.hosts == 2 ? bytes : hierarchy.shape.slot_size;
  }

  Range range_of(Piece piece) const { return {piece * piece_bytes, std::min(bytes_, (piece + 1) * piece_bytes)}; }

  // The rank that has a lane on the host with this number, counted from the root's host.
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

  void send_on(Piece piece) {
    for_each_lane(piece, layout_.local, [&](int lane, Range range) {
      for (const int child : children_) {
        hierarchy_.network().send(rank_at(child, lane), hierarchy_.tag(*this, piece, 0, lane), signature,
                                  data_ + range.begin, range.size(), sending_, piece + 1 < pieces());
      }
    });
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  char* const data_;
  const size_t bytes_;
  const int root_;
  const bool at_root_;
  const Copy copy_;
  int parent_ = 0;
  std::vector<int> children_;  // those with the most hosts behind them first
  std::array<int, SharedSlots::kMaxSlots> receiving_{};
  int sending_ = 0;
};

}  // namespace

OperationPtr make_broadcast(Hierarchy& hierarchy, char* data, size_t bytes, int root) {
  const Signature signature{Signature::Kind::broadcast, NumberType::uint8, Reduction::sum, Wire::exact, root, bytes};
  if (bytes == 0) return make_all_reduce(hierarchy, nullptr, signature);
  if (hierarchy.fabric()) return make_fabric_broadcast(hierarchy, signature, data);
  return std::make_shared<Broadcast>(hierarchy, signature, data);
}

}  // namespace cpulaunch
