#include <cstring>

#include "host_exchange.hpp"
#include "operations.hpp"

namespace cpulaunch {

namespace {

// Up to so many bytes of all local ranks together, each rank reads all of them rather than wait for the others twice ...
constexpr size_t kMaxWholeSize = 64 << 10;
// ... and with other hosts less, because each of these ranks then sends all of it.
constexpr size_t kMaxWholeSizeOfHosts = 8 << 10;
constexpr size_t kGranule = 256;  // bytes: what the sums' loops take at once
constexpr size_t kLeastPart = 64 << 10;  // bytes of a lane's part of a piece, but for the last piece
constexpr size_t kLeastPartOfFabric = 256 << 10;  // as it takes longer to start something
constexpr size_t kPieces = 16;

class AllReduce final : public Operation {
 public:
  AllReduce(Hierarchy& hierarchy, char* data, size_t bytes, NumberType type, Reduction reduction)
      : Operation({Signature::Kind::all_reduce, type, reduction, -1, bytes}, piece_size(hierarchy, bytes)),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        data_(data),
        bytes_(bytes),
        reduce_(reduce_for(type, reduction)) {}

  uint64_t pieces() const override { return (bytes_ + cost - 1) / cost; }

  void put(uint64_t piece) override {
    if (layout_.locals == 1) return;
    const auto range = range_of(piece);
    char* to = hierarchy_.slot(layout_.local, piece);
    if (is_whole(range)) {
      std::memcpy(to, data_ + range.begin, range.size());
    } else {
      copy_others(to - range.begin, data_, range);
    }
  }

  void take(uint64_t piece) override {
    const auto range = range_of(piece);
    if (layout_.locals > 1) for_each_lane(range, [&](int, Range part) { reduce_locally(piece, range, part); });
    if (layout_.hosts > 1) hierarchy_.fabric() ? start_reductions(piece, range) : start_exchanges(piece, range);
  }

  bool exchange(uint64_t piece) override {
    auto& state = states_[hierarchy_.index(piece)];
    if (state.done) return true;
    bool all = true;
    for (auto& each : state.exchanges) all = each.progress() && all;  // a host with few ranks has several lanes for each
    for (auto& each : state.reductions) all = all && each->test();
    if (!all) return false;
    const auto range = range_of(piece);
    for (int local = 0; local < layout_.locals && !is_whole(range); ++local) {
      if (local == layout_.local) continue;
      char* slot = hierarchy_.slot(local, piece) - range.begin;
      for_each_lane(range, [&](int, Range part) {
        std::memcpy(slot + part.begin, data_ + part.begin, part.size());
      });
    }
    state.done = layout_.hosts > 1;
    return true;
  }

  bool collects(uint64_t piece) const override { return layout_.locals > 1 && !is_whole(range_of(piece)); }

  void collect(uint64_t piece) override {
    const auto range = range_of(piece);
    if (collects(piece)) copy_others(data_, hierarchy_.slot(layout_.local, piece) - range.begin, range);
    if (layout_.hosts > 1) states_[hierarchy_.index(piece)] = {};
  }

 private:
  // Between hosts, large pieces take fewer calls of the kernel; yet there should be some, to work on several at a time.
  static size_t piece_size(Hierarchy& hierarchy, size_t bytes) {
    const size_t part = hierarchy.fabric() ? kLeastPartOfFabric : kLeastPart;
    const size_t least = std::min(hierarchy.layout.lanes * part, hierarchy.shape.slot_size);
    const size_t even = (bytes / kPieces + kGranule - 1) / kGranule * kGranule;
    return std::clamp(even, least, hierarchy.shape.slot_size);
  }

  struct State {
    std::vector<HostExchange> exchanges;                // over the network,
    std::vector<std::unique_ptr<Transfer>> reductions;  // or over a fabric
    bool done = false;
  };

  Range range_of(uint64_t piece) const { return {piece * cost, std::min(bytes_, (piece + 1) * cost)}; }

  bool is_whole(Range range) const {
    const size_t most = layout_.hosts == 1 ? kMaxWholeSize : kMaxWholeSizeOfHosts;
    return range.size() * layout_.lanes <= most && layout_.is_even();
  }

  // Calls `act` for what this rank reduces of a piece: with the lane, and the range of the tensor.
  template <class Act>
  void for_each_lane(Range range, const Act& act) const {
    if (is_whole(range)) {
      act(layout_.local, range);
      return;
    }
    for (int lane = layout_.local; lane < layout_.lanes; lane += layout_.locals) {
      const auto part = part_of(range, lane, layout_.lanes, kGranule);
      if (part.size()) act(lane, part);
    }
  }

  // Copies what other local ranks reduce.
  void copy_others(char* to, const char* from, Range range) const {
    size_t at = range.begin;
    for_each_lane(range, [&](int, Range own) {
      std::memcpy(to + at, from + at, own.begin - at);
      at = own.end;
    });
    std::memcpy(to + at, from + at, range.end - at);
  }

  void reduce_locally(uint64_t piece, Range range, Range part) {
    sources_.resize(layout_.locals);
    for (int local = 0; local < layout_.locals; ++local) {
      const char* whole = local == layout_.local ? data_ + range.begin : hierarchy_.slot(local, piece);
      sources_[local] = whole + part.begin - range.begin;
    }
    reduce_(data_ + part.begin, sources_.data(), sources_.size(), part.size());
  }

  void start_exchanges(uint64_t piece, Range range) {
    size_t needed = 0;
    auto& exchanges = states_[hierarchy_.index(piece)].exchanges;
    for_each_lane(range, [&](int lane, Range part) {
      exchanges.emplace_back(hierarchy_, *this, piece, lane, reduce_);
      needed += HostExchange::staging_size(layout_, part.size());
    });
    char* staging = hierarchy_.staging(piece, needed);
    auto exchange = exchanges.begin();  // they stay where they are from here on
    for_each_lane(range, [&](int, Range part) {
      (exchange++)->start(data_ + part.begin, part.size(), staging);
      staging += HostExchange::staging_size(layout_, part.size());
    });
  }

  void start_reductions(uint64_t piece, Range range) {
    auto& reductions = states_[hierarchy_.index(piece)].reductions;
    for_each_lane(range, [&](int lane, Range part) {
      reductions.push_back(hierarchy_.fabric()->reduce(lane, data_ + part.begin, part.size(), signature.type,
                                                       signature.reduction));
    });
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  char* const data_;
  const size_t bytes_;
  Reduce* const reduce_;
  std::array<State, SharedSlots::kMaxSlots> states_;
  std::vector<const char*> sources_;
};

}  // namespace

OperationPtr make_all_reduce(Hierarchy& hierarchy, char* data, size_t bytes, NumberType type, Reduction reduction) {
  return std::make_shared<AllReduce>(hierarchy, data, bytes, type, reduction);
}

}  // namespace cpulaunch
