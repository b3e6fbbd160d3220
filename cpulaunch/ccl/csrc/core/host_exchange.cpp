#include "host_exchange.hpp"

#include "operations.hpp"

namespace cpulaunch {

namespace {

// The most bytes of which more than two hosts exchange all instead of shares.
constexpr size_t kMaxWholeExchange = 8 << 10;

bool goes_whole(const Layout& layout, size_t bytes) { return layout.hosts == 2 || bytes <= kMaxWholeExchange; }

bool is_rounded(Wire wire) { return wire == Wire::bfloat16; }

size_t rounded_size(size_t bytes) { return bytes / size_of(NumberType::float32) * size_of(NumberType::bfloat16); }

}  // namespace

HostExchange::HostExchange(Hierarchy& hierarchy, const Operation& operation, Piece piece, int lane)
    : hierarchy_(&hierarchy), operation_(&operation), piece_(piece), lane_(lane) {
  const auto& signature = operation.signature;
  reduce_ = reduce_for(is_rounded(signature.wire) ? NumberType::bfloat16 : signature.type, signature.reduction);
}

size_t HostExchange::staging_size(const Layout& layout, size_t bytes, Wire wire) {
  size_t size = 0;
  if (is_rounded(wire)) size = bytes = rounded_size(bytes);
  const bool whole = goes_whole(layout, bytes);
  for (const int hosts : layout.grid) {
    const size_t share = whole ? bytes : part_of({0, bytes}, 0, hosts, kCopyGranule).size();
    size += (hosts - 1) * share;
    bytes = share;
  }
  return size;
}

void HostExchange::start(char* data, size_t bytes, char* staging) {
  const auto& layout = hierarchy_->layout;
  data_ = data;
  if (is_rounded(operation_->signature.wire)) {
    wide_ = data;
    data_ = staging;
    to_bfloat16(data_, wide_, bytes / size_of(NumberType::float32));
    bytes = rounded_size(bytes);
    staging += bytes;
  }
  whole_ = goes_whole(layout, bytes);
  phase_ = 0;
  phases_ = (whole_ ? 1 : 2) * layout.grid.size();
  Range range{0, bytes};
  int stride = 1;
  for (const int hosts : layout.grid) {
    dimensions_.push_back({hosts, layout.host / stride % hosts, stride, range, {}, staging, 0, 0});
    auto& dimension = dimensions_.back();
    dimension.share = share_of(dimension, dimension.own);
    range = dimension.share;
    staging += (hosts - 1) * range.size();
    stride *= hosts;
  }
  for (size_t phase = 0; phase < phases_; ++phase) ask(phase);
  send(0);
}

bool HostExchange::progress() {
  while (phase_ < phases_) {
    auto& dimension = dimension_of(phase_);
    if ((reduces(phase_) ? dimension.reducing : dimension.coming) > 0) return false;
    if (reduces(phase_)) reduce(dimension);
    if (++phase_ < phases_) {
      send(phase_);
    } else if (wide_) {
      from_bfloat16(wide_, data_, dimensions_.front().range.size() / size_of(NumberType::bfloat16));
    }
  }
  return true;
}

int HostExchange::rank_at(const Dimension& dimension, int place) const {
  return hierarchy_->layout.rank_with(lane_, hierarchy_->layout.host + (place - dimension.own) * dimension.stride);
}

Range HostExchange::share_of(const Dimension& dimension, int place) const {
  return whole_ ? dimension.range : part_of(dimension.range, place, dimension.hosts, kCopyGranule);
}

char* HostExchange::staging_for(const Dimension& dimension, int place) const {
  return dimension.staging + (place - (place > dimension.own)) * dimension.share.size();
}

// Nothing is sent where there is nothing: the other side knows as well.
void HostExchange::ask(size_t phase) {
  auto& dimension = dimension_of(phase);
  const auto tag = hierarchy_->tag(*operation_, piece_, phase, lane_);
  for (int place = 0; place < dimension.hosts; ++place) {
    const auto range = reduces(phase) ? dimension.share : share_of(dimension, place);
    if (place == dimension.own || range.size() == 0) continue;
    char* to = reduces(phase) ? staging_for(dimension, place) : data_ + range.begin;
    hierarchy_->network().receive(rank_at(dimension, place), tag, operation_->signature, to, range.size(),
                                  reduces(phase) ? dimension.reducing : dimension.coming);
  }
}

void HostExchange::send(size_t phase) {
  auto& dimension = dimension_of(phase);
  const auto tag = hierarchy_->tag(*operation_, piece_, phase, lane_);
  for (int step = 1; step < dimension.hosts; ++step) {  // each host begins with another one
    const int place = (dimension.own + step) % dimension.hosts;
    const auto range = reduces(phase) ? share_of(dimension, place) : dimension.share;
    if (range.size() == 0) continue;
    hierarchy_->network().send(rank_at(dimension, place), tag, operation_->signature, data_ + range.begin,
                               range.size(), reduces(phase) ? dimension.reducing : dimension.coming,
                               /*more_follow=*/piece_ + 1 < operation_->pieces());
  }
}

void HostExchange::reduce(const Dimension& dimension) {
  auto& batch = hierarchy_->batch();
  for (int place = 0; place < dimension.hosts; ++place) {
    batch.add(place == dimension.own ? data_ + dimension.share.begin : staging_for(dimension, place));
  }
  batch.sum(reduce_, data_ + dimension.share.begin, dimension.share.size(), 1);
  batch.run();
}

}  // namespace cpulaunch
