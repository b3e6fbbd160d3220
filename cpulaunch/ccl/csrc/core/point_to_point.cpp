#include "point_to_point.hpp"

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>

#include "copy.hpp"

namespace cpulaunch {

namespace {

// Messages up to this size are sent without being announced: that would take longer than copying them twice.
constexpr size_t kMaxEager = 16 << 10;
// Between these sizes, messages within a host are read from the sender's memory.  For smaller ones, the system calls
// take longer than copying the message twice.  For larger ones, a single thread's copy takes longer than the ring,
// which stays in the caches.
constexpr size_t kLeastRead = 128 << 10, kMostRead = 16 << 20;
// A rank stops reading from a peer once it keeps this many bytes that it has not asked for.
constexpr size_t kMaxKept = 16 << 20;
constexpr size_t kMostNamed = 4;  // unexpected messages that an error message lists
constexpr size_t kMaxStep = 256 << 10;  // bytes that one call moves, so that a waiting caller can check the clock

}  // namespace

// --- streams of bytes to and from one peer

class PointToPoint::Pipe {
 public:
  virtual ~Pipe() = default;
  // Return the number of bytes moved; 0 if nothing can be done now.  Throw ConnectionLost.
  virtual size_t write(const iovec* parts, size_t count) = 0;
  virtual size_t read(char* data, size_t bytes) = 0;
  // Whether the peer has left before it wrote anything.  Always false within a host, where the watchdog detects that.
  virtual bool has_left() { return false; }
  // The bytes that the peer's host may not have received.
  virtual size_t unacknowledged() const { return 0; }
};

class PointToPoint::RingPipe final : public Pipe {
 public:
  RingPipe(SharedSlots& slots, int own, int peer) : out_(slots.ring(own, peer)), in_(slots.ring(peer, own)) {}

  size_t write(const iovec* parts, size_t count) override {
    const auto begin = out_.written.load(std::memory_order_relaxed);  // only this rank writes it
    // Acquire: the peer has read the bytes that this overwrites.
    const auto room = out_.read.load(std::memory_order_acquire) + SharedSlots::kRingSize;
    const auto end = std::min(room, begin + kStretch);
    auto at = begin;
    for (size_t i = 0; i < count && at < end; ++i) {
      const auto* from = static_cast<const char*>(parts[i].iov_base);
      const size_t bytes = std::min<size_t>(parts[i].iov_len, end - at);
      for_each_part(out_, at, bytes, [&](char* to, size_t done, size_t size) { std::memcpy(to, from + done, size); });
      at += bytes;
      if (bytes < parts[i].iov_len) break;
    }
    // Release: a peer that sees the new count also sees the bytes.
    if (at != begin) out_.written.store(at, std::memory_order_release);
    return at - begin;
  }

  size_t read(char* data, size_t bytes) override {
    const Copy copy(bytes);
    const auto at = in_.read.load(std::memory_order_relaxed);  // only this rank writes it
    const auto come = in_.written.load(std::memory_order_acquire) - at;
    bytes = std::min<size_t>({bytes, come, kStretch});
    if (bytes == 0) return 0;
    for_each_part(in_, at, bytes, [&](char* from, size_t done, size_t size) { copy.run(data + done, from, size); });
    in_.read.store(at + bytes, std::memory_order_release);
    return bytes;
  }

 private:
  // Only part of the ring at a time, so that one rank can write while the other one reads.
  static constexpr size_t kStretch = SharedSlots::kRingSize / 4;

  // Calls `act` for the one or two parts of the ring in which these bytes lie.
  template <class Act>
  static void for_each_part(SharedSlots::Ring& ring, uint64_t at, size_t bytes, const Act& act) {
    const size_t offset = at % SharedSlots::kRingSize;
    const size_t first = std::min(bytes, SharedSlots::kRingSize - offset);
    act(ring.data + offset, 0, first);
    if (first < bytes) act(ring.data, first, bytes - first);
  }

  SharedSlots::Ring &out_, &in_;
};

class PointToPoint::SocketPipe final : public Pipe {
 public:
  SocketPipe(Connector& connector, int peer, bool is_shared)
      : connector_(connector), link_(connector, peer, Channel::point_to_point, is_shared) {}

  size_t write(const iovec* parts, size_t count) override {
    if (!link_.is_open()) connector_.look();
    return link_.write(parts, count);
  }

  size_t read(char* data, size_t bytes) override {
    if (!link_.is_settled()) connector_.look();
    return link_.read(data, bytes, bytes >= kLeastForPatience);
  }

  bool has_left() override { return !link_.is_settled() && link_.has_left(); }
  size_t unacknowledged() const override { return link_.unacknowledged(); }

 private:
  Connector& connector_;
  Link link_;
};

// --- messages

class PointToPoint::Progress final : public Transfer {
 public:
  Progress(std::shared_ptr<PointToPoint> all, RequestPtr request)
      : all_(std::move(all)), request_(std::move(request)) {}

  bool test() override { return all_->test(*request_); }
  std::optional<uint64_t> steps() const override { return all_->steps_.load(std::memory_order_relaxed); }
  const void* moved_with() const override { return all_.get(); }
  void abort() override {
    std::lock_guard<std::mutex> lock(all_->mutex_);
    all_->aborted_ = true;
  }
  std::string stragglers() override {
    const int rank = *peer();
    return rank == kAnySource ? "" : std::to_string(rank);
  }
  std::optional<int> peer() override {
    std::lock_guard<std::mutex> lock(all_->mutex_);
    return request_->peer;
  }
  std::optional<std::set<int>> needed() override { return std::set<int>{*peer()}; }
  std::string missing() override {
    std::lock_guard<std::mutex> lock(all_->mutex_);
    return std::string(request_->sends ? "received" : "sent") + (request_->begun ? " all of" : "") +
           " a message with tag " + std::to_string(request_->tag) + all_->instead_of(*request_);
  }
  Cause lost() override {
    std::lock_guard<std::mutex> lock(all_->mutex_);
    return all_->lost(*request_);
  }

 private:
  const std::shared_ptr<PointToPoint> all_;
  const RequestPtr request_;
};

PointToPoint::Peer::Peer() = default;
PointToPoint::Peer::Peer(Peer&&) noexcept = default;
PointToPoint::Peer::~Peer() = default;

PointToPoint::PointToPoint(Layout layout, std::shared_ptr<SharedSlots> slots, std::shared_ptr<Connector> connector)
    : layout_(std::move(layout)), slots_(std::move(slots)), connector_(std::move(connector)), peers_(layout_.size) {
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank == layout_.rank) continue;
    if (layout_.host_numbers[rank] != layout_.host) {
      peers_[rank].pipe = std::make_unique<SocketPipe>(*connector_, rank, layout_.shares_connections);
    } else {
      peers_[rank].pipe = std::make_unique<RingPipe>(*slots_, layout_.local, layout_.local_numbers[rank]);
    }
  }
}

PointToPoint::~PointToPoint() = default;

std::unique_ptr<Transfer> PointToPoint::send(int to, int tag, const char* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto request = make_pooled<Request>(Request{to, tag, const_cast<char*>(data), bytes, /*sends=*/true});
  if (bytes <= kMaxEager) {
    enqueue(to, {Frame::Kind::eager, tag, bytes, 0}, request);
  } else {
    auto& peer = peers_[to];
    const bool is_near = layout_.host_numbers[to] == layout_.host;
    const bool is_read = is_near && bytes >= kLeastRead && (bytes <= kMostRead || layout_.threads > 1);
    peer.announced[peer.next_id] = request;
    enqueue(to, {Frame::Kind::request, tag, bytes, peer.next_id++,
                 is_read ? reinterpret_cast<uint64_t>(data) : 0}, nullptr);
  }
  return std::make_unique<Progress>(shared_from_this(), std::move(request));
}

std::unique_ptr<Transfer> PointToPoint::receive(int from, int tag, char* data, size_t bytes,
                                                int32_t* source) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto request = make_pooled<Request>(Request{from, tag, data, bytes, /*sends=*/false, source});
  bool matched = false;
  for (int rank = 0; rank < layout_.size && !matched; ++rank) {
    if (from == rank || from == kAnySource) matched = match_unexpected(rank, request);
  }
  if (!matched) posted_.push_back(request);
  return std::make_unique<Progress>(shared_from_this(), std::move(request));
}

void PointToPoint::enqueue(int to, const Frame& frame, RequestPtr request) {
  auto& peer = peers_[to];
  peer.queue.push_back({frame, std::move(request)});
  if (peer.queue.size() > 1 || !peer.lost.empty()) return;
  try {
    write_to(to);
  } catch (const ConnectionLost& error) {
    lose(to, error);
  }
}

void PointToPoint::lose(int rank, const ConnectionLost& error) {
  peers_[rank].lost = Cause(CauseKind::connection_lost, layout_.members, rank).with(error.what());
}

// A receive from any source is lost only if all ranks are lost.  A rank may leave once it has sent everything.
Cause PointToPoint::lost(const Request& request) {
  Cause last;
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank == layout_.rank || (request.peer != rank && request.peer != kAnySource)) continue;
    auto& peer = peers_[rank];
    try {
      if (peer.lost.empty() && expects_from(rank) && peer.pipe->has_left()) throw ConnectionLost("it was closed there");
    } catch (const ConnectionLost& error) {
      lose(rank, error);
    }
    if (peer.lost.empty()) return Cause();
    last = peer.lost;
  }
  return last;
}

bool PointToPoint::leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t unacknowledged = 0;
  for (const auto& peer : peers_) unacknowledged += peer.pipe ? peer.pipe->unacknowledged() : 0;
  return aborted_ || delivery_.is_over(unacknowledged);
}

// Lists messages that have arrived instead: "; one with tag 7 from rank 1 waits to be received".
std::string PointToPoint::instead_of(const Request& request) const {
  if (request.sends || request.begun) return "";
  std::set<std::pair<int, int>> others;  // ranks and tags
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (request.peer != rank && request.peer != kAnySource) continue;
    for (const auto& each : peers_[rank].unexpected) others.emplace(rank, each.frame.tag);
  }
  std::string text;
  size_t named = 0;
  for (const auto& [rank, tag] : others) {
    if (named++ == kMostNamed) return text + "; more are waiting";
    text += "; one with tag " + std::to_string(tag) + " from " + layout_.members.name(rank) + " waits to be received";
  }
  return text;
}

// Matches a receive with a message that arrived, or was announced, earlier.
bool PointToPoint::match_unexpected(int from, const RequestPtr& request) {
  auto& peer = peers_[from];
  const auto found = std::find_if(peer.unexpected.begin(), peer.unexpected.end(), [&](const Unexpected& one) {
    return one.frame.tag == request->tag && one.complete;
  });
  if (found == peer.unexpected.end()) return false;
  deliver(from, request, found);
  return true;
}

void PointToPoint::deliver(int from, const RequestPtr& request, Unexpected* message) {
  auto& peer = peers_[from];
  answer(from, request, message->frame);
  if (!request->mismatch && message->frame.kind == Frame::Kind::eager) {
    if (request->bytes) std::memcpy(request->data, message->data.data(), request->bytes);
    request->done = true;
  }
  peer.kept -= message->data.size();
  peer.unexpected.erase(message);
}

// Starts the transfer of a message that a receive was matched with.
void PointToPoint::answer(int from, const RequestPtr& request, const Frame& frame) {
  request->begun = true;
  if (request->source) *request->source = from;
  request->peer = from;
  if (frame.bytes != request->bytes) {
    const auto mismatch = mismatch_of_sizes(layout_.members, from, frame.bytes, request->bytes);
    request->mismatch = std::make_unique<const Mismatch>(mismatch);
  } else if (frame.kind == Frame::Kind::request && frame.address && is_readable(from)) {
    peers_[from].reading.push_back({request, frame});
  } else if (frame.kind == Frame::Kind::request) {
    peers_[from].cleared[frame.id] = request;
    enqueue(from, {Frame::Kind::clear, frame.tag, frame.bytes, frame.id}, nullptr);
  }
}

PointToPoint::RequestPtr PointToPoint::match_posted(int from, int tag) {
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const RequestPtr& one) {
    return one->tag == tag && (one->peer == from || one->peer == kAnySource);
  });
  if (found == posted_.end()) return nullptr;
  auto request = *found;
  posted_.erase(found);
  return request;
}

// Only memory of ranks on this host is readable, whatever address a rank of another host sends.
bool PointToPoint::is_readable(int from) const {
  return layout_.host_numbers[from] == layout_.host && slots_->counters(layout_.local).reads_others;
}

bool PointToPoint::expects_from(int rank) const {
  const auto& peer = peers_[rank];
  if (!peer.announced.empty() || !peer.cleared.empty() || peer.receiving) return true;
  if (peer.kept > kMaxKept) return false;
  return std::any_of(posted_.begin(), posted_.end(), [&](const RequestPtr& one) {
    return one->peer == rank || one->peer == kAnySource;
  });
}

// --- progress

bool PointToPoint::test(Request& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t moved = 0; !request.done && !request.mismatch && !aborted_ && moved < kMaxStep;) {
    const size_t bytes = progress();
    if (bytes == 0) break;
    moved += bytes;
    steps_.fetch_add(1, std::memory_order_relaxed);
  }
  if (request.mismatch) throw Mismatch(*request.mismatch);
  return request.done;
}

size_t PointToPoint::progress() {
  size_t moved = 0;
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank == layout_.rank || !peers_[rank].lost.empty()) continue;
    try {
      moved += write_to(rank);
      if (expects_from(rank)) moved += read_from(rank);
      moved += read_memory(rank);
    } catch (const ConnectionLost& error) {
      lose(rank, error);
    }
  }
  return moved;
}

size_t PointToPoint::write_to(int to) {
  auto& peer = peers_[to];
  size_t moved = 0;
  while (!peer.queue.empty()) {
    auto& [frame, request] = peer.queue.front();
    const size_t data = peer.queue.front().data();
    iovec parts[2];
    size_t count = 0;
    if (peer.written < sizeof(Frame)) {
      parts[count++] = {reinterpret_cast<char*>(&frame) + peer.written, sizeof(Frame) - peer.written};
    }
    const size_t of_data = peer.written - std::min(peer.written, sizeof(Frame));
    if (data > of_data) parts[count++] = {request->data + of_data, data - of_data};
    const size_t written = peer.pipe->write(parts, count);
    peer.written += written;
    moved += written;
    if (peer.written < sizeof(Frame) + data) break;
    if (request) request->done = true;
    peer.queue.pop_front();
    peer.written = 0;
  }
  return moved;
}

size_t PointToPoint::read_memory(int from) {
  auto& peer = peers_[from];
  if (peer.reading.empty()) return 0;
  auto& its = peer.reading.front();
  auto& request = its.request;
  const size_t bytes = std::min(kMaxStep * layout_.threads, request->bytes - its.done);
  try {
    batch_.read(*slots_, layout_.local_numbers[from], request->data + its.done, its.frame.address + its.done, bytes);
    batch_.run();
  } catch (const std::runtime_error& error) {
    throw ConnectionLost(error.what());
  }
  its.done += bytes;
  if (its.done < request->bytes) return bytes;
  const auto whole = std::move(its);
  peer.reading.pop_front();
  enqueue(from, {Frame::Kind::taken, whole.frame.tag, whole.frame.bytes, whole.frame.id}, whole.request);
  return bytes;
}

// Where the data of the current frame goes; null if it has none.
char* PointToPoint::data_of(Peer& peer) {
  if (peer.receiving) return peer.receiving->data;
  if (peer.keeping) return peer.unexpected.back().data.data();
  return peer.discarded.empty() ? nullptr : peer.discarded.data();
}

size_t PointToPoint::read_from(int from) {
  auto& peer = peers_[from];
  size_t moved = 0;
  while (moved < kMaxStep) {
    size_t got = 0;
    if (peer.read < sizeof(Frame)) {
      got = peer.pipe->read(reinterpret_cast<char*>(&peer.frame) + peer.read, sizeof(Frame) - peer.read);
      peer.read += got;
      if (peer.read < sizeof(Frame)) return moved + got;
      begin_frame(from);
    }
    const size_t expected = data_of(peer) ? peer.frame.bytes : 0;
    const size_t of_data = peer.read - sizeof(Frame);
    if (of_data < expected) {
      const size_t data = peer.pipe->read(data_of(peer) + of_data, expected - of_data);
      peer.read += data;
      got += data;
    }
    moved += got;
    if (peer.read < sizeof(Frame) + expected) return moved;
    end_frame(from);
    if (!expects_from(from)) return moved;
  }
  return moved;
}

// Handles the header of a frame, and sets `receiving`, `keeping` or `discarded`: where its data goes.
void PointToPoint::begin_frame(int from) {
  auto& peer = peers_[from];
  const auto& frame = peer.frame;
  if (frame.kind == Frame::Kind::eager && frame.bytes > kMaxEager) throw ConnectionLost("what it sends makes no sense");
  if (frame.kind == Frame::Kind::clear) {
    const auto found = peer.announced.find(frame.id);
    if (found == peer.announced.end()) throw ConnectionLost("what it sends makes no sense");
    found->second->begun = true;
    enqueue(from, {Frame::Kind::data, frame.tag, frame.bytes, frame.id}, found->second);
    peer.announced.erase(found);
  } else if (frame.kind == Frame::Kind::taken) {
    const auto found = peer.announced.find(frame.id);
    if (found == peer.announced.end()) throw ConnectionLost("what it sends makes no sense");
    found->second->done = true;
    peer.announced.erase(found);
  } else if (frame.kind == Frame::Kind::data) {
    const auto found = peer.cleared.find(frame.id);
    if (found == peer.cleared.end()) throw ConnectionLost("what it sends makes no sense");
    peer.receiving = found->second;
    peer.cleared.erase(found);
  } else if (auto request = match_posted(from, frame.tag)) {
    answer(from, request, frame);
    if (frame.kind != Frame::Kind::eager) return;
    if (!request->mismatch) {
      peer.receiving = std::move(request);
    } else {
      peer.discarded.resize(frame.bytes);
    }
  } else {
    const bool eager = frame.kind == Frame::Kind::eager;
    peer.unexpected.push_back({frame, PooledVector<char>(eager ? frame.bytes : 0), !eager});
    peer.keeping = eager;
    peer.kept += eager ? frame.bytes : 0;
  }
}

void PointToPoint::end_frame(int from) {
  auto& peer = peers_[from];
  peer.read = 0;
  if (peer.receiving) peer.receiving->done = true;
  peer.receiving.reset();
  peer.discarded.clear();
  if (!peer.keeping) return;
  peer.keeping = false;
  peer.unexpected.back().complete = true;
  // The receive may have been posted while the message was arriving.
  if (auto request = match_posted(from, peer.frame.tag)) deliver(from, request, &peer.unexpected.back());
}

}  // namespace cpulaunch
