#include "host_exchange.hpp"
#include "operations.hpp"

namespace cpulaunch {

namespace {

// Up to this size of all local ranks' data together, each rank reads and sums all of the data.  Otherwise, each rank
// sums a part, and has to wait for the others twice.
constexpr size_t kMaxWholeSum = 64 << 10;
// The same with several hosts.  It is smaller, because each rank then sends the whole sum to other hosts.
constexpr size_t kMaxWholeSumOfHosts = 8 << 10;
// The fewest bytes of a lane's part of a piece, except in the last piece.  Within a host, a part has at least
// kLeastLanePart for each thread of a rank.  Between hosts, it has at least kLeastLanePart, and at least kLeastShare
// for each host of a row.
constexpr size_t kLeastLanePart = 64 << 10, kLeastShare = 16 << 10;
constexpr size_t kSumPieces = 16;

// A piece is cut into lanes.  A rank reduces its own lane over the ranks of its host, and then over the hosts.
//
// If the ranks reduce by socket (Layout::counterparts), there is a step before that.  A rank first reduces its own lane
// and those of its counterparts on the other sockets, over the ranks of its socket.  It leaves the counterparts' sums
// in its slot.  Then it reduces its own lane over the sums that its counterparts have left for it.  On the way back,
// each rank takes the lanes of its counterparts and passes them on to its neighbors.  So for each lane, only one rank
// of a socket accesses the memory of other sockets.
class AllReduce final : public Operation {
 public:
  AllReduce(Hierarchy& hierarchy, char* data, const Signature& signature)
      : Operation(signature, piece_size(hierarchy, signature.bytes)),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        batch_(hierarchy.batch()),
        data_(signature.bytes ? data : nothing_),
        bytes_(signature.bytes ? signature.bytes : size_of(signature.type)),
        reduce_(reduce_for(signature.type, signature.reduction)),
        divisor_(signature.divisor(layout_.size)) {
    if (layout_.locals > 1) tensor = SharedBlocks::find(data_, bytes_);
  }

  uint64_t pieces() const override { return (bytes_ + piece_bytes - 1) / piece_bytes; }

  void put(Piece piece) override {
    if (layout_.locals == 1) return;
    const auto range = range_of(piece);
    char* to = hierarchy_.slot(layout_.local, piece);
    if (is_whole(range)) {
      batch_.copy(to, data_ + range.begin, range.size());
    } else if (!tensor) {
      copy_others(to - range.begin, data_, range);
    }
    batch_.run();
  }

  void take(Piece piece) override {
    const auto range = range_of(piece);
    if (has_sockets(range)) {
      reduce_on_socket(piece, range);
    } else if (layout_.locals > 1) {
      for_each_lane(range, [&](int, Range part) { reduce_on_host(piece, range, part); });
      batch_.run();
    }
  }

  bool start(Piece piece) override {
    const auto range = range_of(piece);
    if (!reduce_between_sockets(piece, range)) return false;
    if (layout_.hosts > 1) start_exchanges(piece, range);
    return true;
  }

  bool exchange(Piece piece) override {
    const auto range = range_of(piece);
    auto& is_reduced = states_[hierarchy_.index(piece)].is_reduced;
    is_reduced = is_reduced || finish_between_hosts(piece, range);
    return is_reduced && take_from_counterparts(piece, range);
  }

  // Also true if this rank gets no result but its tensor is in shared memory: it must wait until the others have read
  // the tensor.
  bool collects(Piece piece) const override {
    return layout_.locals > 1 && !is_whole(range_of(piece)) && (gets_result(layout_.local) || tensor);
  }

  void collect(Piece piece) override {
    const auto range = range_of(piece);
    if (collects(piece) && !tensor) copy_others(data_, hierarchy_.slot(layout_.local, piece) - range.begin, range);
    batch_.run();
    states_[hierarchy_.index(piece)].clear();
  }

 private:
  // Large pieces take fewer system calls between hosts.  But there should be several pieces, which can overlap.
  static size_t piece_size(Hierarchy& hierarchy, size_t bytes) {
    const auto& layout = hierarchy.layout;
    const size_t part = layout.hosts == 1 ? layout.threads * kLeastLanePart
                                          : std::max(kLeastLanePart, layout.longest_row() * kLeastShare);
    const size_t least = std::min(layout.lanes * part, hierarchy.shape.slot_size);
    const size_t even = (bytes / kSumPieces + kSumGranule - 1) / kSumGranule * kSumGranule;
    return std::clamp(even, least, hierarchy.shape.slot_size);
  }

  struct State {
    PooledVector<HostExchange> exchanges;
    bool is_reduced = false;  // over all hosts

    void clear() {
      exchanges.clear();
      is_reduced = false;
    }
  };

  Range range_of(Piece piece) const { return {piece * piece_bytes, std::min(bytes_, (piece + 1) * piece_bytes)}; }
  Range part_of_lane(Range range, int lane) const { return part_of(range, lane, layout_.lanes, kSumGranule); }

  bool is_whole(Range range) const {
    const size_t most = layout_.hosts == 1 ? kMaxWholeSum : kMaxWholeSumOfHosts;
    return range.size() * layout_.lanes <= most && layout_.is_even();
  }
  // Only the root gets the result of a reduce.  If ranks reduce by socket, the other ranks of the root's host do, too.
  bool gets_result(int local) const {
    const bool is_for_all = signature.kind != Kind::reduce || !layout_.counterparts.empty();
    return is_for_all || layout_.ranks_of[layout_.host][local] == signature.root;
  }
  bool has_sockets(Range range) const { return !layout_.counterparts.empty() && !is_whole(range); }

  // Calls `act` with each lane that this rank reduces of a piece, and with the lane's range of the tensor.
  template <class Act>
  void for_each_lane(Range range, const Act& act) const {
    if (is_whole(range)) {
      act(layout_.local, range);
      return;
    }
    layout_.for_each_lane(layout_.local, [&](int lane) {
      const auto part = part_of_lane(range, lane);
      if (part.size()) act(lane, part);
    });
  }

  // Calls `act` with the lanes that this rank reduces on its socket: its own lane and its counterparts' lanes.
  template <class Act>
  void for_each_counterpart(Range range, const Act& act) const {
    for (const int lane : layout_.counterparts) act(lane, part_of_lane(range, lane));
  }

  // Copies the parts that other ranks of the host reduce, or other ranks of the socket if the ranks reduce by socket.
  void copy_others(char* to, const char* from, Range range) {
    size_t at = range.begin;
    const auto copy_before = [&](int, Range own) {
      batch_.copy(to + at, from + at, own.begin - at);
      at = own.end;
    };
    if (has_sockets(range)) {
      for_each_counterpart(range, copy_before);
    } else {
      for_each_lane(range, copy_before);
    }
    batch_.copy(to + at, from + at, range.end - at);
  }

  // The memory in which the other local ranks read a rank's part of a piece and write their sums: its tensor or slot.
  char* memory_of(int local, Piece piece, Range range) const {
    if (local == layout_.local) return data_ + range.begin;
    char* tensor = is_whole(range) ? nullptr : hierarchy_.tensor(local, piece, bytes_);
    return tensor ? tensor + range.begin : hierarchy_.slot(local, piece);
  }

  void reduce_on_host(Piece piece, Range range, Range part) {
    for (int local = 0; local < layout_.locals; ++local) {
      batch_.add(memory_of(local, piece, range) + part.begin - range.begin);
    }
    sum_last(part);
  }

  // Sums what was added to the batch.  This is the last step within a host, so without other hosts it also divides.
  void sum_last(Range part) {
    batch_.sum(reduce_, data_ + part.begin, part.size(), layout_.hosts == 1 ? divisor_ : 1);
  }

  void reduce_on_socket(Piece piece, Range range) {
    for_each_counterpart(range, [&](int lane, Range part) {
      const size_t at = part.begin - range.begin;
      for (const int local : layout_.neighbors) batch_.add(memory_of(local, piece, range) + at);
      batch_.sum(reduce_, lane == layout_.local ? data_ + part.begin : hierarchy_.slot(layout_.local, piece) + at,
                 part.size(), 1);
    });
    batch_.run();
    hierarchy_.set_mark(&SharedSlots::Counters::on_socket, piece);
  }

  bool counterparts_have(Hierarchy::Mark mark, Piece piece) const {
    return std::all_of(layout_.counterparts.begin(), layout_.counterparts.end(),
                       [&](int local) { return hierarchy_.has_mark(mark, local, piece); });
  }

  bool reduce_between_sockets(Piece piece, Range range) {
    if (!has_sockets(range)) return true;
    if (!counterparts_have(&SharedSlots::Counters::on_socket, piece)) return false;
    const auto part = part_of_lane(range, layout_.local);
    for (const int local : layout_.counterparts) {
      const char* whole = local == layout_.local ? data_ + range.begin : hierarchy_.slot(local, piece);
      batch_.add(whole + part.begin - range.begin);
    }
    sum_last(part);
    batch_.run();
    return true;
  }

  bool finish_between_hosts(Piece piece, Range range) {
    bool all = true;
    auto& state = states_[hierarchy_.index(piece)];
    for (auto& each : state.exchanges) all = each.progress() && all;
    if (!all) return false;
    if (layout_.hosts > 1 && divisor_ > 1) {
      for_each_lane(range, [&](int, Range part) {
        batch_.add(data_ + part.begin);
        batch_.sum(reduce_, data_ + part.begin, part.size(), divisor_);
      });
      batch_.run();
    }
    if (!is_whole(range)) for_each_lane(range, [&](int, Range part) { give(piece, range, part); });
    if (has_sockets(range)) {
      const auto part = part_of_lane(range, layout_.local);
      batch_.copy(hierarchy_.slot(layout_.local, piece) + part.begin - range.begin, data_ + part.begin, part.size());
    }
    batch_.run();
    if (!has_sockets(range)) return true;
    hierarchy_.set_mark(&SharedSlots::Counters::everywhere, piece);
    return true;
  }

  // Copies the sums to the other ranks of the host, or of the socket if the ranks reduce by socket.
  void give(Piece piece, Range range, Range part) {
    const auto give_to = [&](int local) {
      if (local == layout_.local || !gets_result(local)) return;
      batch_.copy(memory_of(local, piece, range) + part.begin - range.begin, data_ + part.begin, part.size());
    };
    if (has_sockets(range)) {
      for (const int local : layout_.neighbors) give_to(local);
    } else {
      for (int local = 0; local < layout_.locals; ++local) give_to(local);
    }
  }

  bool take_from_counterparts(Piece piece, Range range) {
    if (!has_sockets(range)) return true;
    if (!counterparts_have(&SharedSlots::Counters::everywhere, piece)) return false;
    for_each_counterpart(range, [&](int lane, Range part) {
      if (lane == layout_.local) return;
      batch_.copy(data_ + part.begin, hierarchy_.slot(lane, piece) + part.begin - range.begin, part.size());
    });
    batch_.run();
    for_each_counterpart(range, [&](int lane, Range part) {
      if (lane != layout_.local) give(piece, range, part);
    });
    batch_.run();
    return true;
  }

  void start_exchanges(Piece piece, Range range) {
    size_t needed = 0;
    auto& exchanges = states_[hierarchy_.index(piece)].exchanges;
    exchanges.reserve(layout_.most_lanes());
    for_each_lane(range, [&](int lane, Range part) {
      exchanges.emplace_back(hierarchy_, *this, piece, lane);
      needed += HostExchange::staging_size(layout_, part.size(), signature.wire);
    });
    char* staging = hierarchy_.staging(piece, needed);
    auto exchange = exchanges.begin();
    for_each_lane(range, [&](int, Range part) {
      (exchange++)->start(data_ + part.begin, part.size(), staging);
      staging += HostExchange::staging_size(layout_, part.size(), signature.wire);
    });
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  Batch& batch_;
  char nothing_[sizeof(double)] = {};  // without data, the ranks reduce this number, which has no meaning
  char* const data_;
  const size_t bytes_;
  Reduce* const reduce_;
  const int divisor_;
  std::array<State, SharedSlots::kMaxSlots> states_;
};

}  // namespace

OperationPtr make_all_reduce(Hierarchy& hierarchy, char* data, Signature signature) {
  const bool adds = signature.reduction == Reduction::sum || signature.reduction == Reduction::average;
  if (signature.type != NumberType::float32 || !adds) signature.wire = Wire::exact;
  return make_pooled<AllReduce>(hierarchy, data, signature);
}

}  // namespace cpulaunch
