#include <cstring>
#include <optional>

#include "operations.hpp"

namespace cpulaunch {

namespace {

// Parts between these sizes are read directly from the sender's memory.  Smaller ones would take longer.  A large
// result should bypass the caches when it is stored, which the kernel's copies don't do.
constexpr size_t kLeastDirect = 64 << 10, kMostDirect = 4 << 20;

// Before the exchange, the local ranks tell each other how much they send, and where it is.  The number of pieces
// follows from that.
class Counts final : public Operation {
 public:
  Counts(Hierarchy& hierarchy, const Signature& signature, Parts to, Parts from)
      : Operation(signature, sizeof(Sent) * hierarchy.layout.locals),
        sent(std::move(to)),
        received(std::move(from)),
        layout_(hierarchy.layout),
        hierarchy_(hierarchy),
        addresses_(layout_.locals) {}

  uint64_t pieces() const override { return 1; }

  void put(Piece piece) override {
    for (int to = 0; to < layout_.locals && layout_.locals > 1; ++to) {
      const auto its = sent_by(layout_.local, to, piece);
      std::memcpy(hierarchy_.slot(layout_.local, piece) + to * sizeof(its), &its, sizeof(its));
    }
  }

  void take(Piece piece) override {
    direct_ = layout_.locals > 1 && hierarchy_.reads_directly();
    uint64_t most = 0;
    for (int from = 0; from < layout_.locals; ++from) {
      const auto comes = sent_by(from, layout_.local, piece);
      const int rank = rank_of(from);
      if (comes.bytes != received[rank].bytes) {
        throw mismatch_of_sizes(layout_.members, rank, comes.bytes, received[rank].bytes);
      }
      addresses_[from] = goes_directly(comes.bytes) ? comes.address : 0;
      for (int to = 0; to < layout_.locals; ++to) {
        const auto bytes = to == from ? 0 : sent_by(from, to, piece).bytes;  // its part for itself needs no slot
        most = std::max(most, bytes);
        slots_ = slots_ || (bytes > 0 && !goes_directly(bytes));
      }
    }
    most_ = most;
  }

  // The size of the largest part from one local rank to another, once known.
  std::optional<uint64_t> most() const { return most_; }
  // Whether the receiver of a part of this size reads it from the sender's memory.
  bool goes_directly(size_t bytes) const { return direct_ && bytes >= kLeastDirect && bytes <= kMostDirect; }
  // Whether any part goes through slots; valid once most() is known.
  bool needs_slots() const { return slots_; }
  // The address of the part for this rank in a local rank's memory; 0 if the part comes through slots.
  uint64_t address(int local) const { return addresses_[local]; }

  const Parts sent, received;  // of all ranks

 private:
  struct Sent {
    uint64_t bytes, address;
  };

  int rank_of(int local) const { return layout_.ranks_of[layout_.host][local]; }

  // What a local rank sends to another one.  This rank's own slot is not read: if it is alone, it has none.
  Sent sent_by(int from, int to, Piece piece) const {
    const auto& own = sent[rank_of(to)];
    if (from == layout_.local) return {own.bytes, reinterpret_cast<uint64_t>(own.data)};
    Sent its;
    std::memcpy(&its, hierarchy_.slot(from, piece) + to * sizeof(its), sizeof(its));
    return its;
  }

  const Layout& layout_;
  Hierarchy& hierarchy_;
  PooledVector<uint64_t> addresses_;
  bool direct_ = false, slots_ = false;
  std::optional<uint64_t> most_;
};

// Within a host, parts go through slots that have room for one part for each other rank, or directly from one rank's
// memory to another's.  Between hosts, each pair of ranks exchanges messages.
class AllToAll final : public Operation {
 public:
  AllToAll(Hierarchy& hierarchy, const Signature& signature, std::shared_ptr<Counts> counts)
      : Operation(signature, hierarchy.shape.slot_size),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        counts_(std::move(counts)),
        sent_(counts_->sent),
        received_(counts_->received),
        copy_(size_of_all(received_), layout_.large) {}

  bool is_ready() const override { return counts_->most().has_value(); }
  uint64_t pieces() const override { return (*counts_->most() + bytes_of_rank() - 1) / bytes_of_rank(); }

  void begin() override {
    const auto tag = hierarchy_.tag(*this, 0);
    copy_own(pieces() * bytes_of_rank(), received_[layout_.rank].bytes);  // what no piece covers
    for (int step = 1; step < layout_.size; ++step) {  // each rank begins with a different one
      const int rank = (layout_.rank + step) % layout_.size;
      if (layout_.host_numbers[rank] == layout_.host) continue;
      const auto &to = sent_[rank], &from = received_[rank];
      if (from.data) hierarchy_.network().receive(rank, tag, signature, from.data, from.bytes, pending_);
      if (to.data) hierarchy_.network().send(rank, tag, signature, to.data, to.bytes, pending_);
    }
  }

  void put(Piece piece) override {
    for (int local = 0; local < layout_.locals; ++local) {
      if (local == layout_.local) continue;
      const auto& part = sent_[layout_.ranks_of[layout_.host][local]];
      const auto range = range_of(part, piece);
      if (counts_->goes_directly(part.bytes) || range.size() == 0) continue;
      char* slot = hierarchy_.slot(layout_.local, piece) + place_of(local, layout_.local) * bytes_of_rank();
      hierarchy_.batch().copy(slot, part.data + range.begin, range.size());
    }
    hierarchy_.batch().run();
  }

  void take(Piece piece) override {
    auto& batch = hierarchy_.batch();
    for (int step = 1; step < layout_.locals; ++step) {  // each rank begins with a different one
      const int local = (layout_.local + step) % layout_.locals;
      const auto& part = received_[layout_.ranks_of[layout_.host][local]];
      const auto range = range_of(part, piece);
      if (range.size() == 0) continue;
      if (const auto address = counts_->address(local)) {
        batch.read(hierarchy_.slots(), local, part.data + range.begin, address + range.begin, range.size());
      } else {
        const char* slot = hierarchy_.slot(local, piece) + place_of(layout_.local, local) * bytes_of_rank();
        batch.copy(part.data + range.begin, slot, range.size(), copy_);
      }
    }
    batch.run();
  }

  // The last piece waits until the others have read what this rank sends.
  bool collects(Piece piece) const override { return piece + 1 == pieces(); }

  // Copies this rank's part for itself.  That comes last, so that the others don't wait for it.
  void collect(Piece piece) override { copy_own(piece * bytes_of_rank(), (piece + 1) * bytes_of_rank()); }

  bool is_drained() override { return pending_ == 0; }

 private:
  void copy_own(size_t begin, size_t end) const {
    const auto &from = sent_[layout_.rank], &to = received_[layout_.rank];
    end = std::min(end, to.bytes);
    if (begin < end) hierarchy_.batch().copy(to.data + begin, from.data + begin, end - begin, copy_);
    hierarchy_.batch().run();
  }

  // The index of the part for `to` in a slot of `from`, which has no part for itself.
  static size_t place_of(int to, int from) { return to - (to > from); }

  // The bytes of each part that are in a piece.  If nothing goes through slots, there is only one piece.
  size_t bytes_of_rank() const {
    if (counts_->needs_slots()) return piece_bytes / (layout_.locals - 1) / kCopyGranule * kCopyGranule;
    return kMostDirect;
  }

  Range range_of(const Part& part, Piece piece) const {
    return {std::min(piece * bytes_of_rank(), part.bytes), std::min((piece + 1) * bytes_of_rank(), part.bytes)};
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  const std::shared_ptr<const Counts> counts_;
  const Parts &sent_, &received_;
  const Copy copy_;
  int pending_ = 0;
};

}  // namespace

Operations make_all_to_all(Hierarchy& hierarchy, Parts sent, Parts received, Signature signature) {
  auto counts = make_pooled<Counts>(hierarchy, signature, std::move(sent), std::move(received));
  auto exchange = make_pooled<AllToAll>(hierarchy, signature, counts);
  return {std::move(counts), std::move(exchange)};
}

}  // namespace cpulaunch
