#include "network_fabric.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace cpulaunch {

namespace {

constexpr size_t kPart = FabricEndpoint::kLongestMessage;
constexpr size_t kMostUnderWay = 64;        // messages to a rank
constexpr size_t kMostCompletions = 16;     // at a time
constexpr int kMostGreeted = 64;            // hosts
constexpr std::chrono::milliseconds kLookInterval{100};  // for ranks that have gone
// A rank that meets others first yields this often between its polls, and then also sleeps for kPause.
constexpr int kYields = 1000;
constexpr std::chrono::microseconds kPause{100};

// Of the number-th header, or part, from a rank.
uint64_t tag_of(int rank, uint64_t number, bool is_part) {
  constexpr int kNumberBits = 39;
  return static_cast<uint64_t>(rank) << (kNumberBits + 1) | (number & ((uint64_t{1} << kNumberBits) - 1)) << 1 |
         static_cast<uint64_t>(is_part);
}

}  // namespace

FabricNetwork::FabricNetwork(const Layout& layout, std::shared_ptr<Connector> connector,
                             std::unique_ptr<FabricEndpoint> endpoint)
    : MessageNetwork(layout, std::move(connector)),
      rank_(layout.rank),
      endpoint_(std::move(endpoint)),
      peers_(layout.size) {
  for (int rank = 0; rank < layout.size; ++rank) {
    peers_[rank].is_remote = layout.host_numbers[rank] != layout.host;
    links_.emplace_back(*connector_, rank, Channel::collectives, /*is_shared=*/true);
  }
  if (layout.hosts > kMostGreeted) return;
  layout.for_each_lane(layout.local, [&](int lane) {
    for (int host = 0; host < layout.hosts; ++host) {
      const int rank = layout.rank_with(lane, host);
      const bool is_new = std::find(to_greet_.begin(), to_greet_.end(), rank) == to_greet_.end();
      if (host != layout.host && is_new) to_greet_.push_back(rank);
    }
  });
}

// libfabric uses the memory of what it has been asked to do until it is closed.
FabricNetwork::~FabricNetwork() { close_endpoint(); }

void FabricNetwork::close() {
  connector_->close();
  close_endpoint();
  links_.clear();
  incoming_.clear();
  sending_.clear();
  receiving_.clear();
}

// Of two ranks, the first one begins, so that only one connects.
void FabricNetwork::meet() {
  for (const int peer : to_greet_) {
    listen(peer);
    if (peer > rank_) tell(peer, kHello);
  }
  for (int idle = 0;;) {
    idle = complete() + post_all() ? 0 : idle + 1;
    if (all_have_met()) return;
    if (idle > kYields) std::this_thread::sleep_for(kPause);
    if (idle > 0) sched_yield();
  }
}

bool FabricNetwork::all_have_met() {
  const bool looks_now = looks();
  bool all = true;
  for (const int peer : to_greet_) {
    auto& its = peers_[peer];
    if (its.greeted && its.headers_sent == 0) tell(peer, kHello);
    all = all && its.greeted && its.headers_sent > 0;
    if (!its.broken.empty()) lose(peer, its.broken);
    if (looks_now && !its.greeted && has_left(peer)) lose(peer, "it was closed there");
  }
  if (!lost_.empty()) throw std::runtime_error(lost_.text());
  return all && greetings_ == 0;
}

bool FabricNetwork::looks() {
  const auto now = Clock::now();
  if (now - looked_ <= kLookInterval) return false;
  looked_ = now;
  return true;
}

// If a rank has gone in the middle of a message that nobody expected, closing the endpoint of libfabric 2.4's provider
// tcp frees the message twice.  A passive endpoint does nothing any more, so it can stay open.
void FabricNetwork::close_endpoint() {
  static auto& kept = *new std::vector<std::unique_ptr<FabricEndpoint>>;
  static auto& mutex = *new std::mutex;
  if (endpoint_ && !has_parted_ && endpoint_->is_passive()) {
    std::lock_guard<std::mutex> lock(mutex);
    kept.push_back(std::move(endpoint_));
  }
  endpoint_.reset();
}

// A provider may drop what has not been read when its sender closes the connection.
bool FabricNetwork::leave() {
  if (!endpoint_ || !lost_.empty()) return true;
  if (!leaves_) {
    leaves_ = has_parted_ = true;
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      if (look(static_cast<int>(peer)) && is_connected(peers_[peer])) tell(static_cast<int>(peer), kBye);
    }
  }
  complete();
  post_all();
  const bool looks_now = looks();
  bool all = true;
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    auto& its = peers_[peer];
    while (take_header(static_cast<int>(peer))) has_parted_ = false;  // nobody will ask for this message
    if (!is_connected(its) || its.left) continue;
    if (looks_now && its.broken.empty() && has_left(static_cast<int>(peer))) its.broken = "it was closed there";
    if (its.broken.empty()) all = false;
    else has_parted_ = false;
  }
  return all && greetings_ == 0;
}

size_t FabricNetwork::progress() {
  if (!endpoint_) return 0;
  size_t moved = 0;
  if (lost_.empty()) {
    moved += complete();
    keep_if(receiving_, [&](int from) {
      moved += receive_expected(from);
      return !incoming_[from].expected.empty();
    });
    moved += post_all();
  }
  check_when_idle(moved);
  return moved;
}

const Cause& FabricNetwork::lost() {
  if (MessageNetwork::lost().empty() && endpoint_) {
    for (size_t peer = 0; peer < peers_.size() && lost_.empty(); ++peer) {
      if (peers_[peer].sends() && has_left(static_cast<int>(peer))) lose(static_cast<int>(peer), "it was closed there");
    }
  }
  return lost_;
}

std::string FabricNetwork::why_lost(int from) {
  listen(from);
  auto& peer = peers_[from];
  if (peer.left) return "it was closed there";
  if (!peer.broken.empty()) return peer.broken;
  return has_left(from) ? "it was closed there" : "";
}

bool FabricNetwork::has_left(int peer) {
  return links_[peer].has_left();
}

// --- what libfabric does

FabricNetwork::Work* FabricNetwork::new_work(Work::Kind kind, int peer, bool with_memory) {
  auto& from = with_memory ? free_with_memory_ : free_;
  Work* work;
  if (from.empty()) {
    work = &works_.emplace_back();
    if (with_memory) work->memory.reset(new char[kRoom]);
  } else {
    work = from.back();
    from.pop_back();
  }
  work->kind = kind;
  work->peer = peer;
  return work;
}

void FabricNetwork::free(Work* work) { (work->memory ? free_with_memory_ : free_).push_back(work); }

size_t FabricNetwork::complete() {
  libfabric::Completion all[kMostCompletions];
  size_t moved = 0;
  for (;;) {
    const auto count = endpoint_->completions(all, kMostCompletions);
    if (count == -EAGAIN || count == 0) return moved;
    if (count < 0) {
      const auto failure = endpoint_->failure();
      if (!failure.context) throw std::runtime_error("libfabric: " + endpoint_->text_of(failure.error));
      fail(static_cast<Work*>(failure.context), endpoint_->text_of(failure.error));
      moved += 1;
      continue;
    }
    for (ssize_t i = 0; i < count; ++i) moved += complete(static_cast<Work*>(all[i].context), all[i].bytes);
    if (count < static_cast<ssize_t>(kMostCompletions)) return moved;
  }
}

size_t FabricNetwork::complete(Work* work, size_t bytes) {
  auto& peer = peers_[work->peer];
  if (work->kind == Work::Kind::receive_header) {
    work->done = true;
    work->bytes = bytes;
    peer.greeted = true;
    // Greetings and byes are for nobody who expects something.
    if (work == peer.slots[peer.headers_taken % kSlots] && !incoming_[work->peer].in_header) read_header(work->peer);
    return bytes;
  }
  if (work->kind == Work::Kind::send) {
    --peer.under_way;
    --*work->pending;
  } else {
    auto& expected = incoming_[work->peer].expected;
    const auto message = std::find_if(expected.begin(), expected.end(),
                                      [&](const Expected& one) { return one.header.tag == work->message; });
    if (bytes != work->bytes) throw mismatch_of_sizes(members_, work->peer, bytes, work->bytes);
    if (--message->parts == 0) {
      --*message->pending;
      expected.erase(message);
    }
    if (--peer.arriving == 0 && !incoming_[work->peer].in_header) read_header(work->peer);
  }
  const size_t moved = work->bytes;
  free(work);
  return moved;
}

// What isn't needed any more may fail: the rank has left.
void FabricNetwork::fail(Work* work, const std::string& what) {
  auto& peer = peers_[work->peer];
  if (peer.broken.empty()) peer.broken = what;
  const bool is_send = work->kind == Work::Kind::send;
  if (is_send) --peer.under_way, --*work->pending;
  const bool is_needed = is_send ? work->pending != &questions_ && work->pending != &greetings_
                                 : work->kind == Work::Kind::receive_data;
  if (is_needed) lose(work->peer, what);
  if (work->kind != Work::Kind::receive_header) free(work);
}

// --- sending

std::vector<int> FabricNetwork::sending() const {
  std::vector<int> ranks;
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peers_[peer].sends()) ranks.push_back(static_cast<int>(peer));
  }
  return ranks;
}

void FabricNetwork::send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes,
                         int& pending, bool more_follow) {
  enqueue(to, {{tag, signature, bytes}, data, bytes, &pending});
  if (!more_follow) post_sends(to);
}

void FabricNetwork::send_question(int to, const Sent& question) {
  incoming_[to].asked = question.header.tag.operation;
  enqueue(to, question);
}

void FabricNetwork::tell(int to, uint16_t phase) {
  if (phase == kBye && peers_[to].said_bye) return;
  peers_[to].said_bye |= phase == kBye;
  Header header{};
  header.tag.phase = phase;
  enqueue(to, {header, nullptr, /*bytes=*/0, &greetings_});
}

void FabricNetwork::enqueue(int to, const Sent& message) {
  listen(to);
  auto& peer = peers_[to];
  const auto add = [&](Work* work, char* data, size_t bytes, uint64_t tag) {
    work->data = data;
    work->bytes = bytes;
    work->tag = tag;
    work->pending = message.pending;
    ++*message.pending;
    peer.queue.push_back(work);
  };
  const size_t bytes = message.bytes;
  const bool is_small = bytes <= kSmall;
  auto* work = new_work(Work::Kind::send, to, /*with_memory=*/true);
  char* memory = work->memory.get();
  std::memcpy(memory, &message.header, sizeof(Header));
  if (is_small && bytes) std::memcpy(memory + sizeof(Header), message.data, bytes);
  add(work, memory, sizeof(Header) + (is_small ? bytes : 0), tag_of(rank_, peer.headers_sent++, false));
  for (size_t at = 0; !is_small && at < bytes; at += kPart) {
    add(new_work(Work::Kind::send, to), const_cast<char*>(message.data) + at, std::min(kPart, bytes - at),
        tag_of(rank_, peer.parts_sent++, true));
  }
  if (!peer.listed) sending_.push_back(to);
  peer.listed = true;
}

size_t FabricNetwork::post_sends(int to) {
  auto& peer = peers_[to];
  size_t moved = 0;
  while (!peer.queue.empty() && peer.under_way < kMostUnderWay && lost_.empty()) {
    Work* work = peer.queue.front();
    const auto error = endpoint_->send(to, work->data, work->bytes, work->tag, work);
    if (error == -EAGAIN) break;
    peer.queue.pop_front();
    ++peer.under_way;
    moved += 1;
    if (error) fail(work, endpoint_->text_of(error));
  }
  return moved;
}

size_t FabricNetwork::post_all() {
  size_t moved = 0;
  keep_if(sending_, [&](int to) {
    moved += post_sends(to);
    return peers_[to].listed = !peers_[to].queue.empty();
  });
  for (size_t count = unposted_.size(); count > 0; --count) {
    Work* work = unposted_.front();
    unposted_.pop_front();
    post_receive(work);
  }
  return moved;
}

// --- receiving

void FabricNetwork::listen(int from) {
  auto& peer = peers_[from];
  if (peer.slots[0]) return;
  for (size_t i = 0; i < kSlots; ++i) {
    peer.slots[i] = new_work(Work::Kind::receive_header, from, /*with_memory=*/true);
    receive_next(peer.slots[i], i);
  }
}

void FabricNetwork::receive_next(Work* slot, uint64_t header) {
  slot->done = false;
  slot->data = slot->memory.get();
  slot->bytes = kRoom;
  slot->tag = tag_of(slot->peer, header, false);
  post_receive(slot);
}

void FabricNetwork::post_receive(Work* work) {
  const auto error = endpoint_->receive(work->peer, work->data, work->bytes, work->tag, work);
  if (error == -EAGAIN) {
    unposted_.push_back(work);
  } else if (error) {
    fail(work, endpoint_->text_of(error));
  }
}

bool FabricNetwork::look(int from) {
  if (peers_[from].is_remote) listen(from);
  return peers_[from].is_remote;
}

void FabricNetwork::release_slot(int from) {
  auto& peer = peers_[from];
  if (!peer.holds_slot) return;
  peer.holds_slot = false;
  const auto number = peer.headers_taken++;
  receive_next(peer.slots[number % kSlots], number + kSlots);
}

// The header's small data stays in the slot behind it, until the next one is taken.
bool FabricNetwork::take_header(int from) {
  auto& peer = peers_[from];
  auto& header = incoming_[from].header;
  for (;;) {
    release_slot(from);
    const auto* slot = peer.slots[peer.headers_taken % kSlots];
    if (!slot || !slot->done) return false;
    if (slot->bytes < sizeof(Header)) throw std::runtime_error("libfabric has brought a message of another program");
    std::memcpy(&header, slot->data, sizeof(Header));
    if (header.tag.phase == kBye && peer.arriving > 0) return false;
    peer.holds_slot = true;
    if (header.tag.phase == kBye) {
      peer.left = true;
      tell(from, kBye);
    } else if (header.tag.phase != kHello) {
      return true;
    }
  }
}

size_t FabricNetwork::receive_expected(int from) {
  size_t moved = 0;
  auto& peer = incoming_[from];
  listen(from);
  while (!peer.expected.empty() && begin_message(from)) {
    peer.in_message = false;
    auto& message = peer.expected.front();
    moved += message.bytes + 1;
    if (message.bytes > kSmall) {
      receive_parts(from, message);
    } else {
      const auto* slot = peers_[from].slots[peers_[from].headers_taken % kSlots];
      if (slot->bytes != sizeof(Header) + message.bytes) throw std::runtime_error("a message is shorter than it says");
      if (message.bytes) std::memcpy(message.data, slot->data + sizeof(Header), message.bytes);
      --*message.pending;
      peer.expected.pop_front();
    }
    release_slot(from);
  }
  if (peer.expected.empty() && !peer.in_header) read_header(from);
  return moved;
}

void FabricNetwork::receive_parts(int from, Expected& message) {
  auto& peer = peers_[from];
  message.parts = (message.bytes + kPart - 1) / kPart;
  peer.arriving += message.parts;
  for (size_t at = 0; at < message.bytes; at += kPart) {
    auto* work = new_work(Work::Kind::receive_data, from);
    work->data = message.data + at;
    work->bytes = std::min(kPart, message.bytes - at);
    work->message = message.header.tag;
    work->tag = tag_of(from, peer.parts_expected++, true);
    post_receive(work);
  }
}

}  // namespace cpulaunch
