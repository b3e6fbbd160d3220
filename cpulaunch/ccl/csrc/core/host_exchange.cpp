#include "host_exchange.hpp"

#include <cstring>

#include "operations.hpp"

namespace cpulaunch {

namespace {

// Up to this many bytes, hosts exchange the whole range instead of shares: the number of messages matters most.
constexpr size_t kMaxWholeExchange = 8 << 10;

bool goes_whole(const Layout& layout, size_t bytes) { return layout.hosts == 2 || bytes <= kMaxWholeExchange; }

bool is_rounded(Wire wire) { return wire == Wire::bfloat16; }

size_t rounded_size(size_t bytes) { return bytes / size_of(NumberType::float32) * size_of(NumberType::bfloat16); }

}  // namespace

HostExchange::HostExchange(Hierarchy& hierarchy, const Operation& operation, Piece piece, int lane)
    : hierarchy_(&hierarchy), operation_(&operation), piece_(piece), lane_(lane) {
  const auto& signature = operation.signature;
  reduce_ = reduce_for(is_rounded(signature.wire) ? NumberType::bfloat16 : signature.type, signature.reduction);
  if (signature.kind == Kind::reduce) root_host_ = hierarchy.layout.host_numbers[signature.root];
}

size_t HostExchange::staging_size(const Layout& layout, size_t bytes, Wire wire) {
  size_t size = 0;
  if (is_rounded(wire)) size = bytes = rounded_size(bytes);
  const bool whole = goes_whole(layout, bytes);
  if (layout.host >= layout.hosts_in_grid()) return size + (whole ? bytes : 0);
  int guests = layout.guests_of_row(layout.host / layout.grid[0]);
  for (const int hosts : layout.grid) {
    const size_t share = whole ? bytes : part_of({0, bytes}, 0, hosts, kCopyGranule).size();
    size += (hosts + guests - 1) * share;
    bytes = share;
    guests = 0;
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
  bytes_ = bytes;
  whole_ = goes_whole(layout, bytes);
  one_way_ = whole_ && root_host_ >= 0 && bytes > kMaxWholeExchange;
  make_dimensions(staging);
  make_phases();
  for (size_t phase = 0; phase < phases_.size(); ++phase) ask(phase);
  send(0);
}

void HostExchange::make_dimensions(char* staging) {
  const auto& layout = hierarchy_->layout;
  const int guest = layout.host - layout.hosts_in_grid();  // the number of the guest; negative if this host is none
  const int rows = layout.hosts_in_grid() / layout.grid[0];
  const int row = guest < 0 ? layout.host / layout.grid[0] : guest % rows;
  Range range{0, bytes_};
  int stride = 1;
  for (const int hosts : layout.grid) {
    const int guests = stride == 1 ? layout.guests_of_row(row) : 0;
    Dimension dimension{hosts, guests, 0, 0, stride, range, {}, staging};
    if (guest < 0) {
      dimension.own = layout.host / stride % hosts;
      dimension.first = layout.host - dimension.own * stride;
    } else if (stride == 1) {
      dimension.own = hosts + guest / rows;
      dimension.first = row * hosts;
    } else {
      dimension.hosts = 0;
    }
    dimension.share = range = share_of(dimension, dimension.own);
    dimensions_.add(dimension);
    staging += (dimension.places() - 1) * range.size();
    stride *= hosts;
  }
}

void HostExchange::make_phases() {
  for (size_t i = 0; i < dimensions_.size(); ++i) phases_.add({Phase::Kind::reduce, i});
  const auto& layout = hierarchy_->layout;
  if (whole_ && layout.hosts > layout.hosts_in_grid()) phases_.add({Phase::Kind::hand_out});
  if (whole_) return;
  if (root_host_ >= 0) {
    phases_.add({Phase::Kind::deliver});
  } else {
    for (size_t i = dimensions_.size(); i > 0; --i) phases_.add({Phase::Kind::give_back, i - 1});
  }
}

bool HostExchange::progress() {
  while (phase_ < phases_.size()) {
    if (phases_[phase_].pending > 0) return false;
    const auto& phase = phases_[phase_];
    const auto& dimension = dimensions_[phase.dimension];
    const bool is_guest = dimension.is_guest(dimension.own);
    if (phase.kind == Phase::Kind::reduce && !sends_only() && !is_guest) reduce(dimension);
    if (phase.kind == Phase::Kind::hand_out && is_guest) std::memcpy(data_, dimension.staging, bytes_);
    if (++phase_ < phases_.size()) {
      send(phase_);
    } else if (wide_) {
      from_bfloat16(wide_, data_, bytes_ / size_of(NumberType::bfloat16));
    }
  }
  return true;
}

int HostExchange::rank_at(const Dimension& dimension, int place) const {
  const auto& layout = hierarchy_->layout;
  if (!dimension.is_guest(place)) return layout.rank_with(lane_, dimension.first + place * dimension.stride);
  const int in_grid = layout.hosts_in_grid(), rows = in_grid / dimension.hosts, row = dimension.first / dimension.hosts;
  return layout.rank_with(lane_, in_grid + row + (place - dimension.hosts) * rows);
}

Range HostExchange::share_of(const Dimension& dimension, int place) const {
  if (dimension.is_guest(place)) return {dimension.range.end, dimension.range.end};
  return whole_ ? dimension.range : part_of(dimension.range, place, dimension.hosts, kCopyGranule);
}

// The share that a host has reduced after the last dimension.
Range HostExchange::last_share_of(int host) const {
  if (host >= hierarchy_->layout.hosts_in_grid()) return {bytes_, bytes_};
  Range range{0, bytes_};
  for (const int hosts : hierarchy_->layout.grid) {
    range = part_of(range, host % hosts, hosts, kCopyGranule);
    host /= hosts;
  }
  return range;
}

char* HostExchange::staging_for(const Dimension& dimension, int place) const {
  return dimension.staging + (place - (place > dimension.own)) * dimension.share.size();
}

// No message is sent for an empty range, and both sides know that.
void HostExchange::receive(size_t phase, int from, char* to, size_t bytes) {
  if (bytes == 0) return;
  const auto tag = hierarchy_->tag(*operation_, piece_, phase, lane_);
  hierarchy_->network().receive(from, tag, operation_->signature, to, bytes, phases_[phase].pending);
}

void HostExchange::send_to(size_t phase, int to, Range range) {
  if (range.size() == 0) return;
  const auto tag = hierarchy_->tag(*operation_, piece_, phase, lane_);
  hierarchy_->network().send(to, tag, operation_->signature, data_ + range.begin, range.size(), phases_[phase].pending,
                             /*more_follow=*/piece_ + 1 < operation_->pieces());
}

void HostExchange::ask(size_t phase) {
  const auto& layout = hierarchy_->layout;
  const auto kind = phases_[phase].kind;
  if (sends_only()) return;
  if (kind == Phase::Kind::deliver) {
    for (int host = 0; host < layout.hosts && at_root(); ++host) {
      const auto range = last_share_of(host);
      if (host != layout.host) receive(phase, layout.rank_with(lane_, host), data_ + range.begin, range.size());
    }
    return;
  }
  const auto& dimension = dimensions_[phases_[phase].dimension];
  if (kind == Phase::Kind::hand_out) {
    // Not received in place: the guest's own data may still be waiting there to be sent to another host of the row.
    if (dimension.is_guest(dimension.own)) receive(phase, rank_at(dimension, 0), dimension.staging, bytes_);
    return;
  }
  for (int place = 0; place < dimension.places(); ++place) {
    if (place == dimension.own) continue;
    const bool reduces = kind == Phase::Kind::reduce;
    const auto range = reduces ? dimension.share : share_of(dimension, place);
    char* to = reduces ? staging_for(dimension, place) : data_ + range.begin;
    receive(phase, rank_at(dimension, place), to, range.size());
  }
}

void HostExchange::send(size_t phase) {
  const auto kind = phases_[phase].kind;
  if (one_way_ && at_root()) return;
  if (kind == Phase::Kind::deliver) {
    if (!at_root()) send_to(phase, hierarchy_->layout.rank_with(lane_, root_host_), dimensions_.back().share);
    return;
  }
  const auto& dimension = dimensions_[phases_[phase].dimension];
  if (kind == Phase::Kind::hand_out) {
    for (int place = dimension.hosts; place < dimension.places() && dimension.own == 0; ++place) {
      send_to(phase, rank_at(dimension, place), {0, bytes_});
    }
    return;
  }
  for (int step = 1; step < dimension.places(); ++step) {  // each host begins with a different one
    const int place = (dimension.own + step) % dimension.places();
    const auto range = kind == Phase::Kind::reduce ? share_of(dimension, place) : dimension.share;
    send_to(phase, rank_at(dimension, place), range);
  }
}

void HostExchange::reduce(const Dimension& dimension) {
  auto& batch = hierarchy_->batch();
  for (int place = 0; place < dimension.places(); ++place) {
    batch.add(place == dimension.own ? data_ + dimension.share.begin : staging_for(dimension, place));
  }
  batch.sum(reduce_, data_ + dimension.share.begin, dimension.share.size(), 1);
  batch.run();
}

}  // namespace cpulaunch
