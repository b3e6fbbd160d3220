#include "spread_pieces.hpp"
#include "operations.hpp"

namespace cpulaunch {

namespace {

// A piece is a stretch of all inputs.  A rank's goes to the other hosts in the lane with its number on its host, once
// to each, and from the slot of the rank that has received it to all of that host.
class FabricAllGather final : public Operation {
 public:
  FabricAllGather(Hierarchy& hierarchy, const Signature& signature, const char* input, std::vector<char*> outputs,
                  std::vector<size_t> sizes)
      : Operation(signature, hierarchy.shape.slot_size),
        layout_(hierarchy.layout),
        batch_(hierarchy.batch()),
        fabric_(*hierarchy.fabric()),
        pieces_(hierarchy),
        input_(input),
        outputs_(std::move(outputs)),
        sizes_(std::move(sizes)),
        bytes_of_rank_(piece_bytes / (layout_.hosts * layout_.most_lanes()) / kCopyGranule * kCopyGranule),
        copy_(signature.bytes, layout_.large) {}

  uint64_t pieces() const override {
    const size_t longest = *std::max_element(sizes_.begin(), sizes_.end());
    return (longest + bytes_of_rank_ - 1) / bytes_of_rank_;
  }

  bool start(Piece piece) override {
    auto& transfers = pieces_.begin(piece);
    char* to = pieces_.of(layout_.local, piece, piece_bytes);
    layout_.for_each_lane(layout_.local, [&](int lane) {
      std::vector<size_t> bytes;
      size_t all = 0;
      for (int host = 0; host < layout_.hosts; ++host) {
        bytes.push_back(range_of(piece, lane, host).size());
        all += bytes.back();
      }
      const char* from = input_ + std::min(piece * bytes_of_rank_, sizes_[layout_.rank]);
      if (all) transfers.push_back(fabric_.gather(lane, from, to, bytes));
      to += all;
    });
    return true;
  }

  bool exchange(Piece piece) override {
    return pieces_.spread(piece, [&](int local) { take_from(local, piece); });
  }

 private:
  // What a host sends in a lane.
  Range range_of(Piece piece, int lane, int host) const {
    const int rank = layout_.owner_of(lane, host);
    if (rank < 0) return {0, 0};
    return {std::min(piece * bytes_of_rank_, sizes_[rank]), std::min((piece + 1) * bytes_of_rank_, sizes_[rank])};
  }

  void take_from(int local, Piece piece) {
    const char* from = pieces_.of(local, piece, piece_bytes);
    layout_.for_each_lane(local, [&](int lane) {
      for (int host = 0; host < layout_.hosts; ++host) {
        const auto range = range_of(piece, lane, host);
        if (range.size() == 0) continue;
        char* to = outputs_[layout_.owner_of(lane, host)];
        if (to != input_) batch_.copy(to + range.begin, from, range.size(), copy_);
        from += range.size();
      }
    });
    batch_.run();
  }

  const Layout& layout_;
  Batch& batch_;
  Fabric& fabric_;
  SpreadPieces pieces_;
  const char* const input_;
  const std::vector<char*> outputs_;
  const std::vector<size_t> sizes_;
  const size_t bytes_of_rank_;
  const Copy copy_;
};

}  // namespace

OperationPtr make_fabric_all_gather(Hierarchy& hierarchy, const Signature& signature, const char* input,
                                    std::vector<char*> outputs, std::vector<size_t> sizes) {
  return std::make_shared<FabricAllGather>(hierarchy, signature, input, std::move(outputs), std::move(sizes));
}

}  // namespace cpulaunch
