#include "operations.hpp"
#include "spread_pieces.hpp"

namespace cpulaunch {

namespace {

// Up to this size of all inputs together, SmallAllGather takes fewer messages, though most bytes travel several times.
constexpr size_t kMostSmallGather = 64 << 10;
// From this size of all outputs together, the other local ranks read them in place.  For less, that does not pay off,
// because a rank must wait until the others have read its outputs.
constexpr size_t kLeastReadInPlace = 128 << 10;

// Gathers all inputs in one piece.  In each lane, each round doubles the inputs that a host has, until it has all:
//
//     round 0    host h has the input of h                   and gets those of h + 1
//     round 1                       of h and h + 1                          of h + 2 and h + 3
//     round 2                       of h to h + 3                           of h + 4 to h + 7, and so on
//
// A host appends what it receives to what it has, and sends all of that to another host without moving it.
class SmallAllGather final : public Operation {
 public:
  SmallAllGather(Hierarchy& hierarchy, const Signature& signature, const char* input, Parts outputs)
      : Operation(signature, signature.bytes),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        pieces_(hierarchy),
        input_(input),
        outputs_(std::move(outputs)) {
    lanes_.reserve(layout_.most_lanes());
    layout_.for_each_lane(layout_.local, [&](int lane) { lanes_.push_back({lane}); });
  }

  uint64_t pieces() const override { return 1; }

  bool start(Piece piece) override {
    char* to = pieces_.of(layout_.local, piece, piece_bytes);
    for (auto& lane : lanes_) {
      lane.data = to;
      to += size_of(lane.number, layout_.host, layout_.hosts);
      if (layout_.owner_of(lane.number, layout_.host) == layout_.rank) {
        hierarchy_.batch().copy(lane.data, input_, outputs_[layout_.rank].bytes);
        hierarchy_.batch().run();
      }
      for (int round = 0; has_round(round); ++round) receive(lane, round);
      send(lane);
    }
    return true;
  }

  bool exchange(Piece piece) override {
    bool all = true;
    for (auto& lane : lanes_) all = progress(lane) && all;
    return all && pieces_.spread(piece, [&](int local) { take_from(local, piece); });
  }

 private:
  static constexpr int kMostRounds = 31;

  struct Lane {
    int number;
    char* data = nullptr;
    int round = 0;
    std::array<int, kMostRounds> coming{};  // number of messages to receive, for each round
    int going = 0;                          // number of messages to send
  };

  bool has_round(int round) const { return (1 << round) < layout_.hosts; }
  // How many hosts' inputs a host sends in a round: as many as it has, or fewer in the last round.
  int hosts_in(int round) const { return std::min(1 << round, layout_.hosts - (1 << round)); }
  int host_at(int distance) const { return (layout_.host + distance + layout_.hosts) % layout_.hosts; }

  // The size of the inputs of `hosts` hosts from `first` on, in a lane.
  size_t size_of(int lane, int first, int hosts) const {
    size_t size = 0;
    for (int i = 0; i < hosts; ++i) {
      const int rank = layout_.owner_of(lane, (first + i) % layout_.hosts);
      if (rank >= 0) size += outputs_[rank].bytes;
    }
    return size;
  }

  void receive(Lane& lane, int round) {
    const int distance = 1 << round;
    const size_t bytes = size_of(lane.number, host_at(distance), hosts_in(round));
    if (bytes == 0) return;
    hierarchy_.network().receive(layout_.rank_with(lane.number, host_at(distance)), tag(lane, round), signature,
                                 lane.data + size_of(lane.number, layout_.host, distance), bytes, lane.coming[round]);
  }

  void send(Lane& lane) {
    const size_t bytes = size_of(lane.number, layout_.host, hosts_in(lane.round));
    if (bytes == 0) return;
    hierarchy_.network().send(layout_.rank_with(lane.number, host_at(-(1 << lane.round))), tag(lane, lane.round),
                              signature, lane.data, bytes, lane.going);
  }

  // Continues with what has been received.  Returns true when all inputs are here and all messages are sent.
  bool progress(Lane& lane) {
    while (has_round(lane.round) && lane.coming[lane.round] == 0) {
      if (has_round(++lane.round)) send(lane);
    }
    return !has_round(lane.round) && lane.going == 0;
  }

  Tag tag(const Lane& lane, int round) const { return hierarchy_.tag(*this, 0, round, lane.number); }

  void take_from(int local, Piece piece) {
    const char* from = pieces_.of(local, piece, piece_bytes);
    layout_.for_each_lane(local, [&](int lane) {
      for (int i = 0; i < layout_.hosts; ++i) {
        const int rank = layout_.owner_of(lane, host_at(i));
        if (rank < 0) continue;
        const auto& output = outputs_[rank];
        if (output.data != input_) hierarchy_.batch().copy(output.data, from, output.bytes);
        from += output.bytes;
      }
    });
    hierarchy_.batch().run();
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  SpreadPieces pieces_;
  const char* const input_;
  const Parts outputs_;
  PooledVector<Lane> lanes_;
};

// A piece is a stretch of the inputs of one host's ranks.  Each rank puts its own input into its slot for the other
// local ranks.  An input from another host is received by one local rank, which also puts it into its slot.  If a
// rank's outputs are adjacent in shared memory, the others read them there, and the rank puts nothing into its slot.
class AllGather final : public Operation {
 public:
  AllGather(Hierarchy& hierarchy, const Signature& signature, const char* input, Parts outputs)
      : Operation(signature, hierarchy.shape.slot_size),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        input_(input),
        outputs_(std::move(outputs)),
        begins_(begins_of(outputs_)),
        // A local rank may have to put as many inputs as it has lanes.
        bytes_of_rank_(piece_bytes / layout_.most_lanes() / kCopyGranule * kCopyGranule),
        pieces_((size_of_longest(outputs_) + bytes_of_rank_ - 1) / bytes_of_rank_ * layout_.hosts),
        copy_(signature.bytes, layout_.large) {
    const bool is_read = layout_.locals > 1 && signature.bytes >= kLeastReadInPlace;
    if (is_read && are_in_a_row(outputs_)) tensor = SharedBlocks::find(outputs_[0].data, signature.bytes);
  }

  uint64_t pieces() const override { return pieces_; }

  void enter(Piece piece) override {
    const int host = host_of(piece);
    for (const int rank : layout_.ranks_of[host]) {
      const auto range = range_of(piece, rank);
      if (range.size() == 0) continue;
      const auto tag = hierarchy_.tag(*this, piece / layout_.hosts);
      if (host != layout_.host && is_mine(rank)) {
        hierarchy_.network().receive(rank, tag, signature, outputs_[rank].data + range.begin, range.size(),
                                     receiving_[hierarchy_.index(piece)]);
      }
      for (int step = 1; rank == layout_.rank && step < layout_.hosts; ++step) {
        const int to = layout_.rank_with(layout_.local, (layout_.host + step) % layout_.hosts);
        hierarchy_.network().send(to, tag, signature, input_ + range.begin, range.size(), sending_);
      }
    }
  }

  bool can_put(Piece piece) override { return receiving_[hierarchy_.index(piece)] == 0; }

  void put(Piece piece) override {
    const auto own = range_of(piece, layout_.rank);
    char* const to = outputs_[layout_.rank].data;
    if (layout_.locals > 1 && !tensor) put_all(piece);
    if (host_of(piece) == layout_.host && to != input_) {
      hierarchy_.batch().copy(to + own.begin, input_ + own.begin, own.size(), copy_);
    }
    hierarchy_.batch().run();
  }

  void take(Piece piece) override {
    for (int local = 0; local < layout_.locals; ++local) {
      if (local != layout_.local) take_from(local, piece);
    }
    hierarchy_.batch().run();
  }

  // If the others read this rank's outputs in place, it waits for them here, because the outputs may change afterwards.
  bool collects(Piece) const override { return static_cast<bool>(tensor); }

  bool is_drained() override { return sending_ == 0; }

 private:
  int host_of(Piece piece) const { return static_cast<int>((layout_.host + piece) % layout_.hosts); }

  Range range_of(Piece piece, int rank) const {
    const size_t begin = piece / layout_.hosts * bytes_of_rank_;
    const size_t end = outputs_[rank].bytes;
    return {std::min(begin, end), std::min(begin + bytes_of_rank_, end)};
  }

  // Whether this rank provides the input of `rank` on this host: its own, or one that it receives from another host.
  bool is_mine(int rank) const {
    return layout_.local_with(layout_.local_numbers[rank], layout_.host) == layout_.local;
  }

  void put_all(Piece piece) {
    char* slot = hierarchy_.slot(layout_.local, piece);
    for (const int rank : layout_.ranks_of[host_of(piece)]) {
      if (!is_mine(rank)) continue;
      const auto range = range_of(piece, rank);
      const char* from = rank == layout_.rank ? input_ : outputs_[rank].data;
      hierarchy_.batch().copy(slot, from + range.begin, range.size());
      slot += bytes_of_rank_;
    }
  }

  void take_from(int local, Piece piece) {
    const char* theirs = hierarchy_.tensor(local, piece, signature.bytes);
    const char* slot = hierarchy_.slot(local, piece);
    for (const int rank : layout_.ranks_of[host_of(piece)]) {
      if (layout_.local_with(layout_.local_numbers[rank], layout_.host) != local) continue;
      const auto range = range_of(piece, rank);
      const char* from = theirs ? theirs + begins_[rank] + range.begin : slot;
      hierarchy_.batch().copy(outputs_[rank].data + range.begin, from, range.size(), copy_);
      slot += bytes_of_rank_;
    }
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  const char* const input_;
  const Parts outputs_;
  const PooledVector<size_t> begins_;  // of each rank's output, if the outputs are adjacent
  const size_t bytes_of_rank_;
  const uint64_t pieces_;
  const Copy copy_;
  std::array<int, SharedSlots::kMaxSlots> receiving_{};
  int sending_ = 0;
};

}  // namespace

OperationPtr make_all_gather(Hierarchy& hierarchy, const char* input, Parts outputs) {
  const uint64_t all = size_of_all(outputs);
  Signature signature{Kind::all_gather, NumberType::uint8, Reduction::sum, Wire::exact, -1, all};
  signature.sizes = digest_of(outputs);
  if (all == 0) return make_all_reduce(hierarchy, nullptr, signature);
  if (hierarchy.layout.hosts > 2 && all <= kMostSmallGather) {
    return make_pooled<SmallAllGather>(hierarchy, signature, input, std::move(outputs));
  }
  return make_pooled<AllGather>(hierarchy, signature, input, std::move(outputs));
}

}  // namespace cpulaunch
