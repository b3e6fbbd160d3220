#include <cstring>
#include <numeric>

#include "operations.hpp"

namespace cpulaunch {

namespace {

// The most bytes of all parts together that are summed as one, though a rank needs only its part of that.
constexpr size_t kMostSmallScatter = 64 << 10;

// One sum of all parts, in memory of its own, which takes far fewer messages than a sum for each host.
class SmallReduceScatter final : public Operation {
 public:
  SmallReduceScatter(Hierarchy& hierarchy, const Signature& signature, char* output,
                     const std::vector<const char*>& inputs, std::vector<size_t> sizes)
      : Operation(signature, signature.bytes), output_(output), sizes_(std::move(sizes)), rank_(hierarchy.layout.rank) {
    all_.reserve(signature.bytes);
    for (size_t rank = 0; rank < sizes_.size(); ++rank) {
      all_.insert(all_.end(), inputs[rank], inputs[rank] + sizes_[rank]);
    }
    sum_ = make_all_reduce(hierarchy, all_.data(), signature);
  }

  void begin() override {
    sum_->signature.sequence = signature.sequence;
    sum_->begin();
  }
  uint64_t pieces() const override { return sum_->pieces(); }
  void enter(Piece piece) override { sum_->enter(piece); }
  bool can_put(Piece piece) override { return sum_->can_put(piece); }
  void put(Piece piece) override { sum_->put(piece); }
  void take(Piece piece) override { sum_->take(piece); }
  bool start(Piece piece) override { return sum_->start(piece); }
  bool exchange(Piece piece) override { return sum_->exchange(piece); }
  bool collects(Piece piece) const override { return sum_->collects(piece); }
  void collect(Piece piece) override {
    sum_->collect(piece);
    if (piece + 1 < pieces() || sizes_[rank_] == 0) return;
    const auto before = std::accumulate(sizes_.begin(), sizes_.begin() + rank_, size_t{0});
    std::memcpy(output_, all_.data() + before, sizes_[rank_]);
  }
  bool is_drained() override { return sum_->is_drained(); }

 private:
  char* const output_;
  const std::vector<size_t> sizes_;
  const int rank_;
  std::vector<char> all_;
  OperationPtr sum_;
};

// The most bytes of a stretch that a rank keeps, from all hosts.
constexpr size_t kMostComing = 16 << 20;

// A piece is a stretch of what the ranks of one host get.  The local ranks reduce it for that host, each for some of
// those ranks, and send it there; the own host's comes last, and is reduced with what the other hosts have sent.  Where
// a rank's inputs are in shared memory, in a row, the others read them there, and it puts nothing into its slot.
class ReduceScatter final : public Operation {
 public:
  ReduceScatter(Hierarchy& hierarchy, const Signature& signature, char* output, std::vector<const char*> inputs,
                std::vector<size_t> sizes)
      : Operation(signature, hierarchy.shape.slot_size),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        output_(output),
        inputs_(std::move(inputs)),
        sizes_(std::move(sizes)),
        reduce_(reduce_for(signature.type, signature.reduction)),
        divisor_(signature.divisor(layout_.size)),
        begins_(begins_of(sizes_)),
        bytes_of_rank_(std::min(piece_bytes / std::max(layout_.lanes - 1, 1), kMostComing / layout_.hosts) /
                       kSumGranule * kSumGranule) {
    if (layout_.locals > 1 && are_in_a_row(inputs_, begins_)) tensor = SharedBlocks::find(inputs_[0], signature.bytes);
  }

  uint64_t pieces() const override {
    const size_t longest = *std::max_element(sizes_.begin(), sizes_.end());
    return (longest + bytes_of_rank_ - 1) / bytes_of_rank_ * layout_.hosts;
  }

  void enter(Piece piece) override {
    states_[hierarchy_.index(piece)] = {hierarchy_.staging(piece, layout_.most_lanes() * bytes_of_rank_), 0};
    if (layout_.hosts > 1 && piece % layout_.hosts == 0) ask(piece);
  }

  void put(Piece piece) override {
    for (int local = 0; local < layout_.locals; ++local) {
      if (local == layout_.local || tensor) continue;
      for_each(piece, local, [&](int rank, Range range) {
        hierarchy_.batch().copy(in_slot(layout_.local, piece, rank), inputs_[rank] + range.begin, range.size());
      });
    }
    hierarchy_.batch().run();
  }

  void take(Piece piece) override {
    auto& batch = hierarchy_.batch();
    auto& state = states_[hierarchy_.index(piece)];
    const bool ours = host_of(piece) == layout_.host, alone = layout_.locals == 1;
    char* staging = state.staging;
    for_each(piece, layout_.local, [&](int rank, Range range) {
      char* to = ours ? output_ + range.begin : staging;
      if (!alone) reduce_locally(piece, to, rank, range);
      if (alone && ours) batch.copy(to, inputs_[rank] + range.begin, range.size());
      staging += bytes_of_rank_;
    });
    batch.run();
    if (ours) return;
    staging = state.staging;
    for_each(piece, layout_.local, [&](int rank, Range range) {
      const char* reduced = alone ? inputs_[rank] + range.begin : staging;
      hierarchy_.network().send(rank, tag(piece), signature, reduced, range.size(), state.sending);
      staging += bytes_of_rank_;
    });
  }

  // Once this is over, the inputs may change.
  bool collects(Piece) const override { return static_cast<bool>(tensor); }

  bool exchange(Piece piece) override {
    auto& state = states_[hierarchy_.index(piece)];
    if (state.sending > 0) return false;
    const bool ours = host_of(piece) == layout_.host;
    if (layout_.hosts > 1 && ours) {
      const auto& coming = coming_for(piece);
      if (coming.pending > 0) return false;
      reduce_hosts(coming.memory, piece);
    }
    return true;
  }

 private:
  struct State {
    char* staging = nullptr;  // for what goes to another host
    int sending = 0;
  };
  // What other hosts have for this rank in one stretch.
  struct Coming {
    char* memory = nullptr;
    int pending = 0;
  };
  // A stretch has two pieces or more.
  static constexpr size_t kStretches = Hierarchy::kStretches;

  int host_of(Piece piece) const { return static_cast<int>((layout_.host + 1 + piece) % layout_.hosts); }

  Tag tag(Piece piece) const { return hierarchy_.tag(*this, piece / layout_.hosts); }

  Range range_of(Piece piece, int rank) const {
    const size_t begin = piece / layout_.hosts * bytes_of_rank_;
    return {std::min(begin, sizes_[rank]), std::min(begin + bytes_of_rank_, sizes_[rank])};
  }

  Coming& coming_for(Piece piece) { return coming_[piece / layout_.hosts % kStretches]; }

  // This is done before any of the stretch is sent: a piece waits until what it sends is on its way, and the others
  // would wait like that, too, instead of asking for it in their last piece.
  void ask(Piece piece) {
    const auto range = range_of(piece, layout_.rank);
    if (range.size() == 0) return;
    auto& coming = coming_for(piece);
    const size_t all = (layout_.hosts - 1) * range.size();  // none after it is longer
    if (!coming.memory) coming.memory = hierarchy_.stretch(&coming - coming_.data(), all);
    char* to = coming.memory;
    for (int host = 0; host < layout_.hosts; ++host) {
      if (host == layout_.host) continue;
      const int from = layout_.rank_with(layout_.local, host);
      hierarchy_.network().receive(from, tag(piece), signature, to, range.size(), coming.pending);
      to += range.size();
    }
  }

  // The local rank that reduces what a rank gets.
  int reducer_for(int rank) const { return layout_.local_with(layout_.local_numbers[rank], layout_.host); }

  // Calls `act` for what a local rank reduces of a piece: for which rank, and what of that rank's.
  template <class Act>
  void for_each(Piece piece, int local, const Act& act) const {
    for (const int rank : layout_.ranks_of[host_of(piece)]) {
      const auto range = range_of(piece, rank);
      if (reducer_for(rank) == local && range.size()) act(rank, range);
    }
  }

  // Where what a local rank has for a rank lies in its slot.  What it reduces itself isn't there: at least one rank's,
  // unless the host of that rank has fewer ranks than there are lanes.
  char* in_slot(int local, Piece piece, int rank) const {
    size_t before = 0;
    for (const int other : layout_.ranks_of[host_of(piece)]) {
      if (other == rank) break;
      if (reducer_for(other) != local) ++before;
    }
    return hierarchy_.slot(local, piece) + before * bytes_of_rank_;
  }

  // Where what a local rank has for a rank is.
  const char* memory_of(int local, Piece piece, int rank, Range range) const {
    if (local == layout_.local) return inputs_[rank] + range.begin;
    const char* tensor = hierarchy_.tensor(local, piece, signature.bytes);
    return tensor ? tensor + begins_[rank] + range.begin : in_slot(local, piece, rank);
  }

  void reduce_locally(Piece piece, char* to, int rank, Range range) {
    auto& batch = hierarchy_.batch();
    for (int local = 0; local < layout_.locals; ++local) batch.add(memory_of(local, piece, rank, range));
    batch.sum(reduce_, to, range.size(), layout_.hosts == 1 ? divisor_ : 1);
  }

  void reduce_hosts(const char* coming, Piece piece) {
    const auto range = range_of(piece, layout_.rank);
    auto& batch = hierarchy_.batch();
    for (int host = 0; host < layout_.hosts; ++host) {
      batch.add(host == layout_.host ? output_ + range.begin : coming);
      if (host != layout_.host) coming += range.size();
    }
    batch.sum(reduce_, output_ + range.begin, range.size(), divisor_);
    batch.run();
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  char* const output_;
  const std::vector<const char*> inputs_;
  const std::vector<size_t> sizes_;
  Reduce* const reduce_;
  const int divisor_;
  const std::vector<size_t> begins_;  // of each rank's, where they are in a row
  const size_t bytes_of_rank_;
  std::array<State, SharedSlots::kMaxSlots> states_;
  std::array<Coming, kStretches> coming_;
};

}  // namespace

OperationPtr make_reduce_scatter(Hierarchy& hierarchy, char* output, std::vector<const char*> inputs,
                                 std::vector<size_t> sizes, NumberType type, Reduction reduction) {
  const auto all = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  Signature signature{Kind::reduce_scatter, type, reduction, Wire::exact, -1, all};
  signature.sizes = digest_of(sizes);
  if (all == 0) return make_all_reduce(hierarchy, nullptr, signature);
  if (hierarchy.layout.hosts > 2 && all <= kMostSmallScatter) {
    return std::make_shared<SmallReduceScatter>(hierarchy, signature, output, inputs, std::move(sizes));
  }
  return std::make_shared<ReduceScatter>(hierarchy, signature, output, std::move(inputs), std::move(sizes));
}

}  // namespace cpulaunch
