#include <numeric>

#include "operations.hpp"

namespace cpulaunch {

namespace {

// A piece is a stretch of the inputs of one host's ranks.  For those of another host, each input is received by one
// local rank, which puts it into its slot for the others.
class AllGather final : public Operation {
 public:
  AllGather(Hierarchy& hierarchy, const Signature& signature, const char* input, std::vector<char*> outputs,
            std::vector<size_t> sizes)
      : Operation(signature, hierarchy.shape.slot_size),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        input_(input),
        outputs_(std::move(outputs)),
        sizes_(std::move(sizes)),
        // As many as a local rank may have to put.
        stretch_(piece_bytes / layout_.most_lanes() / kCopyGranule * kCopyGranule),
        copy_(signature.bytes) {}

  uint64_t pieces() const override {
    const size_t longest = *std::max_element(sizes_.begin(), sizes_.end());
    return (longest + stretch_ - 1) / stretch_ * layout_.hosts;
  }

  void enter(uint64_t piece) override {
    const int host = host_of(piece);
    for (const int rank : layout_.ranks_of[host]) {
      const auto range = range_of(piece, rank);
      if (range.size() == 0) continue;
      const auto tag = hierarchy_.tag(*this, piece / layout_.hosts);
      if (host != layout_.host && is_mine(rank)) {
        hierarchy_.network().receive(rank, tag, signature, outputs_[rank] + range.begin, range.size(),
                                     receiving_[hierarchy_.index(piece)]);
      }
      for (int step = 1; rank == layout_.rank && step < layout_.hosts; ++step) {
        const int to = layout_.rank_with(layout_.local, (layout_.host + step) % layout_.hosts);
        hierarchy_.network().send(to, tag, signature, input_ + range.begin, range.size(), sending_);
      }
    }
  }

  bool can_put(uint64_t piece) override { return receiving_[hierarchy_.index(piece)] == 0; }

  void put(uint64_t piece) override {
    const auto own = range_of(piece, layout_.rank);
    const bool copied = host_of(piece) == layout_.host && outputs_[layout_.rank] != input_;
    if (layout_.locals > 1) put_all(piece);
    if (copied) hierarchy_.batch().copy(outputs_[layout_.rank] + own.begin, input_ + own.begin, own.size(), copy_);
    hierarchy_.batch().run();
  }

  void take(uint64_t piece) override {
    for (int local = 0; local < layout_.locals; ++local) {
      if (local != layout_.local) take_from(local, piece);
    }
    hierarchy_.batch().run();
  }

  bool is_drained() override { return sending_ == 0; }

 private:
  int host_of(uint64_t piece) const { return static_cast<int>((layout_.host + piece) % layout_.hosts); }

  Range range_of(uint64_t piece, int rank) const {
    const size_t begin = piece / layout_.hosts * stretch_;
    return {std::min(begin, sizes_[rank]), std::min(begin + stretch_, sizes_[rank])};
  }

  // Whether this rank brings that rank's input to its host.
  bool is_mine(int rank) const {
    return layout_.local_with(layout_.local_numbers[rank], layout_.host) == layout_.local;
  }

  void put_all(uint64_t piece) {
    char* slot = hierarchy_.slot(layout_.local, piece);
    for (const int rank : layout_.ranks_of[host_of(piece)]) {
      if (!is_mine(rank)) continue;
      const auto range = range_of(piece, rank);
      const char* from = rank == layout_.rank ? input_ : outputs_[rank];
      hierarchy_.batch().copy(slot, from + range.begin, range.size());
      slot += stretch_;
    }
  }

  void take_from(int local, uint64_t piece) {
    const char* slot = hierarchy_.slot(local, piece);
    for (const int rank : layout_.ranks_of[host_of(piece)]) {
      if (layout_.local_with(layout_.local_numbers[rank], layout_.host) != local) continue;
      const auto range = range_of(piece, rank);
      hierarchy_.batch().copy(outputs_[rank] + range.begin, slot, range.size(), copy_);
      slot += stretch_;
    }
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  const char* const input_;
  const std::vector<char*> outputs_;
  const std::vector<size_t> sizes_;
  const size_t stretch_;
  const Copy copy_;
  std::array<int, SharedSlots::kMaxSlots> receiving_{};
  int sending_ = 0;
};

}  // namespace

OperationPtr make_all_gather(Hierarchy& hierarchy, const char* input, std::vector<char*> outputs,
                             std::vector<size_t> sizes) {
  const auto all = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  Signature signature{Kind::all_gather, NumberType::uint8, Reduction::sum, Wire::exact, -1, all};
  signature.sizes = digest_of(sizes);
  if (all == 0) return make_all_reduce(hierarchy, nullptr, signature);
  if (hierarchy.fabric()) {
    return make_fabric_all_gather(hierarchy, signature, input, std::move(outputs), std::move(sizes));
  }
  return std::make_shared<AllGather>(hierarchy, signature, input, std::move(outputs), std::move(sizes));
}

}  // namespace cpulaunch
