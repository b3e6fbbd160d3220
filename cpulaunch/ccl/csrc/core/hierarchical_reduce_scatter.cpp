#include <cstring>

#include "operations.hpp"

namespace cpulaunch {

namespace {

// Up to this size of all parts together, each rank sums all parts, although it needs only one.
constexpr size_t kMostSmallScatter = 64 << 10;

// Reduces all parts by one all_reduce on a copy, which takes far fewer messages than a reduction for each host.
class SmallReduceScatter final : public Operation {
 public:
  SmallReduceScatter(Hierarchy& hierarchy, const Signature& signature, char* output, const Parts& inputs)
      : Operation(signature, signature.bytes),
        output_{output, inputs[hierarchy.layout.rank].bytes},
        before_(begins_of(inputs)[hierarchy.layout.rank]) {
    all_.reserve(signature.bytes);
    for (const auto& input : inputs) all_.insert(all_.end(), input.data, input.data + input.bytes);
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
    if (piece + 1 == pieces() && output_.bytes) std::memcpy(output_.data, all_.data() + before_, output_.bytes);
  }
  bool is_drained() override { return sum_->is_drained(); }

 private:
  const Part output_;
  const size_t before_;  // where this rank's part begins
  PooledVector<char> all_;
  OperationPtr sum_;
};

// The most bytes that a rank receives from all hosts in one stretch.
constexpr size_t kMostComing = 16 << 20;

// A piece is a stretch of the results of one host's ranks.  The local ranks reduce it over this host, each for some of
// those ranks, and send it to that host.  The piece for this host comes last, and is reduced together with what the
// other hosts have sent.  If a rank's inputs are adjacent in shared memory, the others read them there, and the rank
// puts nothing into its slot.
class ReduceScatter final : public Operation {
 public:
  ReduceScatter(Hierarchy& hierarchy, const Signature& signature, char* output, Parts inputs)
      : Operation(signature, hierarchy.shape.slot_size),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        output_(output),
        inputs_(std::move(inputs)),
        begins_(begins_of(inputs_)),
        reduce_(reduce_for(signature.type, signature.reduction)),
        divisor_(signature.divisor(layout_.size)),
        bytes_of_rank_(std::min(piece_bytes / std::max(layout_.lanes - 1, 1), kMostComing / layout_.hosts) /
                       kSumGranule * kSumGranule),
        pieces_((size_of_longest(inputs_) + bytes_of_rank_ - 1) / bytes_of_rank_ * layout_.hosts) {
    if (layout_.locals > 1 && are_in_a_row(inputs_)) tensor = SharedBlocks::find(inputs_[0].data, signature.bytes);
  }

  uint64_t pieces() const override { return pieces_; }

  void enter(Piece piece) override {
    states_[hierarchy_.index(piece)] = {hierarchy_.staging(piece, layout_.most_lanes() * bytes_of_rank_), 0};
    if (layout_.hosts > 1 && piece % layout_.hosts == 0) ask(piece);
  }

  void put(Piece piece) override {
    for (int local = 0; local < layout_.locals; ++local) {
      if (local == layout_.local || tensor) continue;
      for_each(piece, local, [&](int rank, Range range) {
        hierarchy_.batch().copy(in_slot(layout_.local, piece, rank), inputs_[rank].data + range.begin, range.size());
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
      if (alone && ours) batch.copy(to, inputs_[rank].data + range.begin, range.size());
      staging += bytes_of_rank_;
    });
    batch.run();
    if (ours) return;
    staging = state.staging;
    for_each(piece, layout_.local, [&](int rank, Range range) {
      const char* reduced = alone ? inputs_[rank].data + range.begin : staging;
      hierarchy_.network().send(rank, tag(piece), signature, reduced, range.size(), state.sending);
      staging += bytes_of_rank_;
    });
  }

  // If the others read this rank's inputs in place, it waits for them here, because the inputs may change afterwards.
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
    char* staging = nullptr;  // memory for sums that go to another host
    int sending = 0;
  };
  // The data that other hosts send to this rank in one stretch.
  struct Coming {
    char* memory = nullptr;
    int pending = 0;
  };
  // With several hosts, a stretch takes at least two pieces.
  static constexpr size_t kStretches = Hierarchy::kStretches;

  int host_of(Piece piece) const { return static_cast<int>((layout_.host + 1 + piece) % layout_.hosts); }

  Tag tag(Piece piece) const { return hierarchy_.tag(*this, piece / layout_.hosts); }

  Range range_of(Piece piece, int rank) const {
    const size_t begin = piece / layout_.hosts * bytes_of_rank_;
    const size_t end = inputs_[rank].bytes;
    return {std::min(begin, end), std::min(begin + bytes_of_rank_, end)};
  }

  Coming& coming_for(Piece piece) { return coming_[piece / layout_.hosts % kStretches]; }

  // Posts the receives of a stretch, before any of it is sent.  If they were posted in the stretch's last piece, ranks
  // could block each other: each piece waits until its messages are sent, so no rank would reach its last piece.
  void ask(Piece piece) {
    const auto range = range_of(piece, layout_.rank);
    if (range.size() == 0) return;
    auto& coming = coming_for(piece);
    const size_t all = (layout_.hosts - 1) * range.size();  // later stretches are not longer
    if (!coming.memory) coming.memory = hierarchy_.stretch(&coming - coming_.data(), all);
    char* to = coming.memory;
    for (int host = 0; host < layout_.hosts; ++host) {
      if (host == layout_.host) continue;
      const int from = layout_.rank_with(layout_.local, host);
      hierarchy_.network().receive(from, tag(piece), signature, to, range.size(), coming.pending);
      to += range.size();
    }
  }

  // The local rank that reduces the part of `rank`.
  int reducer_for(int rank) const { return layout_.local_with(layout_.local_numbers[rank], layout_.host); }

  // Calls `act` for each part that a local rank reduces of a piece: with the rank that gets it, and the part's range.
  template <class Act>
  void for_each(Piece piece, int local, const Act& act) const {
    for (const int rank : layout_.ranks_of[host_of(piece)]) {
      const auto range = range_of(piece, rank);
      if (reducer_for(rank) == local && range.size()) act(rank, range);
    }
  }

  // Where a local rank's input for `rank` lies in its slot.  The slot lacks the inputs that the local rank reduces
  // itself: at least one, unless the host of `rank` has fewer ranks than there are lanes.
  char* in_slot(int local, Piece piece, int rank) const {
    size_t before = 0;
    for (const int other : layout_.ranks_of[host_of(piece)]) {
      if (other == rank) break;
      if (reducer_for(other) != local) ++before;
    }
    return hierarchy_.slot(local, piece) + before * bytes_of_rank_;
  }

  // Where a local rank's input for `rank` is.
  const char* memory_of(int local, Piece piece, int rank, Range range) const {
    if (local == layout_.local) return inputs_[rank].data + range.begin;
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
  const Parts inputs_;
  const PooledVector<size_t> begins_;  // of each rank's input, if the inputs are adjacent
  Reduce* const reduce_;
  const int divisor_;
  const size_t bytes_of_rank_;
  const uint64_t pieces_;
  std::array<State, SharedSlots::kMaxSlots> states_;
  std::array<Coming, kStretches> coming_;
};

}  // namespace

OperationPtr make_reduce_scatter(Hierarchy& hierarchy, char* output, Parts inputs, NumberType type,
                                 Reduction reduction) {
  const uint64_t all = size_of_all(inputs);
  Signature signature{Kind::reduce_scatter, type, reduction, Wire::exact, -1, all};
  signature.sizes = digest_of(inputs);
  if (all == 0) return make_all_reduce(hierarchy, nullptr, signature);
  if (hierarchy.layout.hosts > 2 && all <= kMostSmallScatter) {
    return make_pooled<SmallReduceScatter>(hierarchy, signature, output, inputs);
  }
  return make_pooled<ReduceScatter>(hierarchy, signature, output, std::move(inputs));
}

}  // namespace cpulaunch
