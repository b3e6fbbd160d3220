#include <cstring>
#include <optional>
#include <stdexcept>

#include "copy.hpp"
#include "operations.hpp"

namespace cpulaunch {

namespace {

constexpr size_t kGranule = 64;  // bytes

Signature all_to_all() { return {Signature::Kind::all_to_all}; }

// The local ranks tell each other how much they send, from which follows how many pieces there are.
class Counts final : public Operation {
 public:
  Counts(Hierarchy& hierarchy, std::vector<size_t> sent, std::vector<size_t> received)
      : Operation(all_to_all(), sizeof(uint64_t) * sent.size()),
        hierarchy_(hierarchy),
        sent_(std::move(sent)),
        received_(std::move(received)) {}

  uint64_t pieces() const override { return 1; }

  void put(uint64_t piece) override {
    if (sent_.size() > 1) std::memcpy(hierarchy_.slot(hierarchy_.layout.local, piece), sent_.data(), cost);
  }

  void take(uint64_t piece) override {
    const auto& layout = hierarchy_.layout;
    std::vector<uint64_t> counts = sent_;
    uint64_t most = 0;
    for (int local = 0; local < layout.locals; ++local) {
      if (local != layout.local) std::memcpy(counts.data(), hierarchy_.slot(local, piece), cost);
      if (local == layout.local) counts = sent_;
      const auto comes = counts[layout.local];
      if (comes != received_[local]) {
        throw std::runtime_error("rank " + std::to_string(layout.ranks_of[layout.host][local]) +
                                 " of the group sends " + std::to_string(comes) +
                                 " bytes to this rank, which expects " + std::to_string(received_[local]));
      }
      counts[local] = 0;  // a rank's own needs no slot
      most = std::max(most, *std::max_element(counts.begin(), counts.end()));
    }
    most_ = most;
  }

  // The largest number of bytes from one local rank to another.
  std::optional<uint64_t> most() const { return most_; }

 private:
  Hierarchy& hierarchy_;
  const std::vector<uint64_t> sent_, received_;  // for each local rank
  std::optional<uint64_t> most_;
};

// Between the ranks of a host, through slots with a part for each other one; between hosts, a message for each pair.
class AllToAll final : public Operation {
 public:
  AllToAll(Hierarchy& hierarchy, std::vector<Part> sent, std::vector<Part> received, std::shared_ptr<Counts> counts)
      : Operation(all_to_all(), hierarchy.shape.slot_size),
        hierarchy_(hierarchy),
        layout_(hierarchy.layout),
        sent_(std::move(sent)),
        received_(std::move(received)),
        counts_(std::move(counts)),
        stretch_(cost / std::max(layout_.locals - 1, 1) / kGranule * kGranule),
        copy_(total(received_)) {}

  bool is_ready() const override { return counts_->most().has_value(); }
  uint64_t pieces() const override { return (*counts_->most() + stretch_ - 1) / stretch_; }

  void begin() override {
    const auto tag = hierarchy_.tag(*this, 0);
    copy_own(pieces() * stretch_, received_[layout_.rank].bytes);  // what no piece covers
    for (int step = 1; step < layout_.size; ++step) {  // each rank begins with another one
      const int rank = (layout_.rank + step) % layout_.size;
      if (layout_.host_numbers[rank] == layout_.host) continue;
      const auto &to = sent_[rank], &from = received_[rank];
      if (from.data) hierarchy_.network().receive(rank, tag, signature, from.data, from.bytes, pending_);
      if (to.data) hierarchy_.network().send(rank, tag, signature, to.data, to.bytes, pending_);
    }
  }

  void put(uint64_t piece) override {
    for (int local = 0; local < layout_.locals; ++local) {
      if (local == layout_.local) continue;
      char* slot = hierarchy_.slot(layout_.local, piece) + place_of(local, layout_.local) * stretch_;
      copy(slot, nullptr, sent_[layout_.ranks_of[layout_.host][local]], piece);
    }
  }

  void take(uint64_t piece) override {
    for (int local = 0; local < layout_.locals; ++local) {
      if (local == layout_.local) continue;
      const char* slot = hierarchy_.slot(local, piece) + place_of(layout_.local, local) * stretch_;
      copy(nullptr, slot, received_[layout_.ranks_of[layout_.host][local]], piece);
    }
  }

  // The others don't wait for what this rank has for itself.
  void collect(uint64_t piece) override { copy_own(piece * stretch_, (piece + 1) * stretch_); }

  bool is_drained() const override { return pending_ == 0; }

 private:
  static size_t total(const std::vector<Part>& parts) {
    size_t sum = 0;
    for (const auto& part : parts) sum += part.bytes;
    return sum;
  }

  void copy_own(size_t begin, size_t end) const {
    const auto &from = sent_[layout_.rank], &to = received_[layout_.rank];
    end = std::min(end, to.bytes);
    if (begin < end) copy_.run(to.data + begin, from.data + begin, end - begin);
  }

  // The place, in a slot of `from`, of what is for `to`: it has none for itself.
  static size_t place_of(int to, int from) { return to - (to > from); }

  // Copies a piece's stretch of a part to a slot, or from there.
  void copy(char* to_slot, const char* from_slot, const Part& part, uint64_t piece) const {
    const size_t begin = std::min(piece * stretch_, part.bytes), end = std::min(begin + stretch_, part.bytes);
    if (begin == end) return;
    char* data = part.data + begin;
    if (to_slot) std::memcpy(to_slot, data, end - begin);
    if (from_slot) copy_.run(data, from_slot, end - begin);
  }

  Hierarchy& hierarchy_;
  const Layout& layout_;
  const std::vector<Part> sent_, received_;
  const std::shared_ptr<Counts> counts_;
  const size_t stretch_;
  const Copy copy_;
  int pending_ = 0;
};

}  // namespace

std::vector<OperationPtr> make_all_to_all(Hierarchy& hierarchy, std::vector<Part> sent, std::vector<Part> received) {
  std::vector<size_t> to_locals, from_locals;
  for (const int rank : hierarchy.layout.ranks_of[hierarchy.layout.host]) {
    to_locals.push_back(sent[rank].bytes);
    from_locals.push_back(received[rank].bytes);
  }
  auto counts = std::make_shared<Counts>(hierarchy, std::move(to_locals), std::move(from_locals));
  auto exchange = std::make_shared<AllToAll>(hierarchy, std::move(sent), std::move(received), counts);
  return {std::move(counts), std::move(exchange)};
}

}  // namespace cpulaunch
