#include "spread_pieces.hpp"
#include "operations.hpp"

namespace cpulaunch {

namespace {

// A piece is a stretch of what all ranks get.  A rank reduces over its host what the ranks of its lanes get, and sends
// each its part; it reduces what has come for itself.
class FabricReduceScatter final : public Operation {
 public:
  FabricReduceScatter(Hierarchy& hierarchy, const Signature& signature, char* output,
                      std::vector<const char*> inputs, std::vector<size_t> sizes)
      : Operation(signature, hierarchy.shape.slot_size),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        pieces_(hierarchy),
        output_(output),
        inputs_(std::move(inputs)),
        sizes_(std::move(sizes)),
        reduce_(reduce_for(signature.type, signature.reduction)),
        divisor_(signature.divisor(layout_.size)),
        bytes_of_rank_(piece_bytes / layout_.size / kSumGranule * kSumGranule) {}

  uint64_t pieces() const override {
    const size_t longest = *std::max_element(sizes_.begin(), sizes_.end());
    return (longest + bytes_of_rank_ - 1) / bytes_of_rank_;
  }

  void put(Piece piece) override {
    for (int local = 0; local < layout_.locals; ++local) {
      if (local != layout_.local) for_each(piece, local, [&](int rank, Range range) {
        hierarchy_.batch().copy(in_slot(layout_.local, piece, rank), inputs_[rank] + range.begin, range.size());
      });
    }
    hierarchy_.batch().run();
  }

  void take(Piece piece) override {
    char* next = sent(piece);
    auto& batch = hierarchy_.batch();
    for_each(piece, layout_.local, [&](int rank, Range range) {
      char* to = rank == layout_.rank ? output_ + range.begin : next;
      if (rank != layout_.rank) next += range.size();
      if (layout_.locals == 1) {
        batch.copy(to, inputs_[rank] + range.begin, range.size());
        return;
      }
      for (int local = 0; local < layout_.locals; ++local) {
        batch.add(local == layout_.local ? inputs_[rank] + range.begin : in_slot(local, piece, rank));
      }
      batch.sum(reduce_, to, range.size(), 1);
    });
    batch.run();
  }

  bool start(Piece piece) override {
    auto& transfers = pieces_.begin(piece);
    char *from = sent(piece), *to = received(piece);
    layout_.for_each_lane(layout_.local, [&](int lane) {
      const size_t own = lane == layout_.local ? range_of(piece, layout_.rank).size() : 0;
      Fabric::Sizes sent, received;
      size_t all = 0, ours = 0;
      for (int host = 0; host < layout_.hosts; ++host) {
        const int rank = layout_.owner_of(lane, host);
        const size_t its = rank < 0 ? 0 : range_of(piece, rank).size();
        all += its;
        sent.push_back(host == layout_.host ? 0 : its);
        received.push_back(host == layout_.host ? 0 : own);
        ours += sent.back();
      }
      if (all) transfers.push_back(hierarchy_.fabric()->exchange(lane, from, sent, to, received));
      from += ours;
    });
    return true;
  }

  bool exchange(Piece piece) override {
    if (!pieces_.is_here(piece)) return false;
    const auto range = range_of(piece, layout_.rank);
    const char* next = received(piece);
    auto& batch = hierarchy_.batch();
    for (int host = 0; host < layout_.hosts; ++host) {
      batch.add(host == layout_.host ? output_ + range.begin : next);
      if (host != layout_.host) next += range.size();
    }
    batch.sum(reduce_, output_ + range.begin, range.size(), divisor_);
    batch.run();
    return true;
  }

 private:
  Range range_of(Piece piece, int rank) const {
    return {std::min(piece * bytes_of_rank_, sizes_[rank]), std::min((piece + 1) * bytes_of_rank_, sizes_[rank])};
  }

  // Calls `act` for what a local rank reduces of a piece, lane by lane: for which rank, and what of that rank's.
  template <class Act>
  void for_each(Piece piece, int local, const Act& act) const {
    layout_.for_each_lane(local, [&](int lane) {
      for (int host = 0; host < layout_.hosts; ++host) {
        const int rank = layout_.owner_of(lane, host);
        if (rank < 0) continue;
        const auto range = range_of(piece, rank);
        if (range.size()) act(rank, range);
      }
    });
  }

  char* in_slot(int local, Piece piece, int rank) const {
    return hierarchy_.slot(local, piece) + rank * bytes_of_rank_;
  }

  // What goes to other hosts, and behind it what comes from them.
  char* sent(Piece piece) { return hierarchy_.staging(piece, (layout_.size + layout_.hosts) * bytes_of_rank_); }
  char* received(Piece piece) { return sent(piece) + layout_.size * bytes_of_rank_; }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  SpreadPieces pieces_;
  char* const output_;
  const std::vector<const char*> inputs_;
  const std::vector<size_t> sizes_;
  Reduce* const reduce_;
  const int divisor_;
  const size_t bytes_of_rank_;
};

}  // namespace

OperationPtr make_fabric_reduce_scatter(Hierarchy& hierarchy, const Signature& signature, char* output,
                                        std::vector<const char*> inputs, std::vector<size_t> sizes) {
  return std::make_shared<FabricReduceScatter>(hierarchy, signature, output, std::move(inputs), std::move(sizes));
}

}  // namespace cpulaunch
