#include "spread_pieces.hpp"
#include "operations.hpp"

namespace cpulaunch {

namespace {

constexpr size_t kLeastFabricLanePart = 128 << 10;  // bytes of a lane's part of a piece, but for the last piece
constexpr size_t kFabricBroadcastPieces = 16;
// With this many pieces for each host, the hosts form a chain, in which each sends the data once.  With fewer, the
// root's sends it to all.
constexpr size_t kSpreadPiecesForChain = 2;
// How many steps after the one in which a part has come a host of the chain sends it on: some are under way then.
constexpr uint64_t kLag = 2;
static_assert(kLag < SharedSlots::kMaxSlots, "what has come is still there");

// On the root's host, the ranks take pieces from the root's slot.  Each then sends its lane's part to other hosts,
// where it goes to a slot for the others.
//
// A chain goes in steps, of which each is one exchange of a lane: a host receives the next part of the data from the
// one before it while it passes on an earlier part.  A step is a piece here, also where a host has nothing to do in it.
class FabricBroadcast final : public Operation {
 public:
  FabricBroadcast(Hierarchy& hierarchy, const Signature& signature, char* data)
      : Operation(signature, piece_size(hierarchy, signature.bytes)),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        pieces_(hierarchy),
        data_(data),
        bytes_(signature.bytes),
        parts_((bytes_ + piece_bytes - 1) / piece_bytes),
        root_host_(layout_.host_numbers[signature.root]),
        at_root_(root_host_ == layout_.host),
        place_((layout_.host - root_host_ + layout_.hosts) % layout_.hosts),
        chain_(layout_.hosts > 2 && parts_ >= kSpreadPiecesForChain * layout_.hosts) {}

  uint64_t pieces() const override { return parts_ + (chain_ ? kLag * (layout_.hosts - 2) : 0); }

  void put(Piece piece) override {
    const auto range = arriving(piece);
    if (layout_.locals > 1 && layout_.rank == signature.root) {
      hierarchy_.batch().copy(hierarchy_.slot(layout_.local, piece), data_ + range.begin, range.size());
      hierarchy_.batch().run();
    }
  }

  void take(Piece piece) override {
    const auto range = arriving(piece);
    if (!at_root_ || layout_.rank == signature.root) return;
    const char* slot = hierarchy_.slot(layout_.local_numbers[signature.root], piece);
    hierarchy_.batch().copy(data_ + range.begin, slot, range.size());
    hierarchy_.batch().run();
  }

  bool start(Piece piece) override {
    // What this host passes on now has come in that step.
    if (chain_ && !at_root_ && piece >= kLag && !pieces_.is_here(piece.before(kLag))) return false;
    auto& transfers = pieces_.begin(piece);
    layout_.for_each_lane(layout_.local, [&](int lane) {
      if (chain_) {
        start_step(piece, lane, transfers);
      } else if (const auto part = part_of_lane(arriving(piece), lane); part.size()) {
        transfers.push_back(hierarchy_.fabric()->broadcast(lane, data_ + part.begin, part.size(), root_host_));
      }
    });
    return true;
  }

  bool exchange(Piece piece) override {
    if (at_root_) return pieces_.is_here(piece);
    const auto range = arriving(piece);
    return pieces_.spread(piece, [&](int local) {
      if (layout_.locals == 1) return;
      const bool own = local == layout_.local;
      char* slot = hierarchy_.slot(local, piece);
      layout_.for_each_lane(local, [&](int lane) {
        const auto part = part_of_lane(range, lane);
        char *in_slot = slot + part.begin - range.begin, *data = data_ + part.begin;
        hierarchy_.batch().copy(own ? in_slot : data, own ? data : in_slot, part.size());
      });
      hierarchy_.batch().run();
    });
  }

 private:
  static size_t piece_size(Hierarchy& hierarchy, size_t bytes) {
    const size_t least = std::min(hierarchy.layout.lanes * kLeastFabricLanePart, hierarchy.shape.slot_size);
    const size_t even = (bytes / kFabricBroadcastPieces + kCopyGranule - 1) / kCopyGranule * kCopyGranule;
    return std::clamp(even, least, hierarchy.shape.slot_size);
  }

  // Of the data, by the number of a part, which may be beyond its ends.
  Range range_of(int64_t part) const {
    if (part < 0 || part >= static_cast<int64_t>(parts_)) return {0, 0};
    return {part * piece_bytes, std::min(bytes_, (part + 1) * piece_bytes)};
  }
  // What comes to this host in a step, or is sent by it where it is the root's.
  Range arriving(Piece piece) const { return range_of(static_cast<int64_t>(piece) - lag_at(place_ - 1)); }
  Range leaving(Piece piece) const {
    return place_ + 1 < layout_.hosts ? range_of(static_cast<int64_t>(piece) - lag_at(place_)) : Range{0, 0};
  }
  int64_t lag_at(int place) const { return chain_ ? static_cast<int64_t>(kLag) * std::max(place, 0) : 0; }

  Range part_of_lane(Range range, int lane) const { return part_of(range, lane, layout_.lanes, kCopyGranule); }

  void start_step(Piece piece, int lane, SpreadPieces::Transfers& transfers) {
    const auto comes = at_root_ ? Range{0, 0} : part_of_lane(arriving(piece), lane);
    const auto goes = part_of_lane(leaving(piece), lane);
    Fabric::Sizes sent(layout_.hosts), received(layout_.hosts);
    received[(layout_.host + layout_.hosts - 1) % layout_.hosts] = comes.size();
    sent[(layout_.host + 1) % layout_.hosts] = goes.size();
    transfers.push_back(
        hierarchy_.fabric()->exchange(lane, data_ + goes.begin, sent, data_ + comes.begin, received));
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  SpreadPieces pieces_;
  char* const data_;
  const size_t bytes_;
  const uint64_t parts_;
  const int root_host_;
  const bool at_root_;
  const int place_;  // of this host, counted from the root's
  const bool chain_;
};

}  // namespace

OperationPtr make_fabric_broadcast(Hierarchy& hierarchy, const Signature& signature, char* data) {
  return std::make_shared<FabricBroadcast>(hierarchy, signature, data);
}

}  // namespace cpulaunch
