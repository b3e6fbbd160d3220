#include "network_tcp.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>

namespace cpulaunch {

namespace {

constexpr size_t kMaxParts = 16;             // of what one call of the kernel sends
constexpr size_t kTurn = 1 << 20;            // bytes of one peer after which another one's turn comes
// Calls of progress() in which nothing moves, until unasked messages are looked for: some 0.1 s for one who sleeps in
// between.
constexpr unsigned kIdleCallsPerCheck = 1000;
// The phase in the tag of a message that asks whether its receiver calls the same.
constexpr uint16_t kQuestion = 0xffff;

}  // namespace

void TcpNetwork::close() {
  connector_->close();
  outgoing_.clear();
  incoming_.clear();
  sending_.clear();
  receiving_.clear();
}

void TcpNetwork::enter(const Signature& signature) {
  current_ = signature;
  if (signature.root >= 0) entered_ = Clock::now();
}

void TcpNetwork::send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes, int& pending,
                   bool more_follow) {
  enqueue(to, {{tag, signature, bytes}, data, &pending}, more_follow);
}

void TcpNetwork::enqueue(int to, const Sent& message, bool more_follow) {
  ++*message.pending;
  auto& peer = outgoing_[to];
  peer.queue.push_back(message);
  if (!peer.listed) sending_.push_back(to);
  peer.listed = true;
  if (peer.queue.size() == 1 && !more_follow) write_to(to);
}

void TcpNetwork::receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes, int& pending) {
  ++pending;
  auto& peer = incoming_[from];
  if (peer.expected.empty()) receiving_.push_back(from);
  peer.expected.push_back({tag, signature, data, bytes, &pending});
}

// Where there are many connections, those with nothing to read take no call of the kernel; neither do those that have
// not been opened, but for one of them.
size_t TcpNetwork::read_from_ready() {
  size_t moved = 0;
  bool looks = true;
  const auto* ready = readiness_.is_asked() && !receiving_.empty() ? &readiness_.ask(incoming_.size()) : nullptr;
  // A peer's turn may end its place in this list, or come again in a later call.
  for (size_t i = 0; i < receiving_.size();) {
    const int from = receiving_[i];
    const auto& peer = incoming_[from];
    const bool is_known = peer.receiver.is_open(), has_rest = peer.in_header || peer.begin < peer.end;
    if (!ready || !is_known || has_rest || (*ready)[from]) moved += read_from(from, looks);
    looks = looks && is_known;
    if (peer.expected.empty()) {
      receiving_[i] = receiving_.back();
      receiving_.pop_back();
    } else {
      ++i;
    }
  }
  return moved;
}

size_t TcpNetwork::progress() {
  size_t moved = read_from_ready();
  for (size_t i = 0; i < sending_.size();) {
    const int to = sending_[i];
    moved += write_to(to);
    if (outgoing_[to].queue.empty()) {
      outgoing_[to].listed = false;
      sending_[i] = sending_.back();
      sending_.pop_back();
    } else {
      ++i;
    }
  }
  idle_calls_ = moved ? 0 : idle_calls_ + 1;
  if (idle_calls_ == kIdleCallsPerCheck || !lost_.empty()) {
    idle_calls_ = 0;
    check_unasked();
  }
  return moved;
}

std::vector<int> TcpNetwork::awaited() const {
  if (receiving_.empty()) {
    auto ranks = sending_;
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }
  // Later messages may not have been sent because the earliest have not come to their senders either.
  std::map<std::tuple<uint64_t, uint32_t, uint16_t>, std::set<int>> ranks;
  for (const int rank : receiving_) {
    for (const auto& each : incoming_[rank].expected) {
      ranks[{each.tag.operation, each.tag.piece, each.tag.phase}].insert(rank);
    }
  }
  const auto& earliest = ranks.begin()->second;
  return {earliest.begin(), earliest.end()};
}

const Cause& TcpNetwork::lost() {
  for (size_t i = 0; i < receiving_.size() && lost_.empty(); ++i) {
    const int from = receiving_[i];
    try {
      ask(from);
      auto& sender = outgoing_[from].sender;
      if (open_receiver(from) || !incoming_[from].silent.has_left(*connector_, from, Channel::collectives, sender)) {
        continue;
      }
      lose(from, "it was closed there");
    } catch (const ConnectionLost& error) {
      lose(from, error.what());
    }
  }
  return lost_;
}

// Asks once for each operation.
void TcpNetwork::ask(int rank) {
  auto& peer = incoming_[rank];
  if (peer.expected.empty()) return;
  const auto& awaited = peer.expected.front();
  if (peer.asked == awaited.tag.operation) return;
  auto& sender = outgoing_[rank].sender;
  try {
    if (!sender.is_open()) sender = connector_->connect(rank, Channel::collectives);
  } catch (const std::runtime_error&) {
    return;  // whether it has left is seen elsewhere
  }
  peer.asked = awaited.tag.operation;
  const Tag tag{awaited.tag.operation, 0, kQuestion};
  enqueue(rank, {{tag, awaited.signature, /*bytes=*/0}, nullptr, &questions_}, /*more_follow=*/false);
}

// True when the message whose header is in the buffer was a question about this rank's operation, or about one before:
// its sender waits for what another rank, or the network, has not brought yet.  Throws Mismatch where this rank calls
// something else.
bool TcpNetwork::answer(int from) {
  auto& peer = incoming_[from];
  const auto& signature = peer.header.signature;
  if (peer.header.tag.phase != kQuestion || !current_ || signature.sequence > current_->sequence) return false;
  if (signature.sequence == current_->sequence && signature != *current_) {
    throw signature.mismatch(members_, from, *current_);
  }
  peer.in_header = false;
  return true;
}

void TcpNetwork::lose(int peer, const std::string& what) {
  if (lost_.empty()) lost_ = Cause(CauseKind::connection_lost, members_, peer).with(what);
}

// --- sending

// Returns the bytes written; takes what is complete off the queue.
size_t TcpNetwork::write_to(int to) {
  auto& peer = outgoing_[to];
  if (peer.queue.empty() || !lost_.empty()) return 0;
  size_t written = 0;
  try {
    if (!peer.sender.is_open()) peer.sender = connector_->connect(to, Channel::collectives);
    written = write_some(peer);
  } catch (const ConnectionLost& error) {
    // Who isn't there to answer may have sent all that is needed.
    const auto is_question = [](const Sent& message) { return message.header.tag.phase == kQuestion; };
    if (!std::all_of(peer.queue.begin(), peer.queue.end(), is_question)) lose(to, error.what());
    peer.queue.clear();
    peer.done = 0;
  }
  if (written == 0) return 0;
  size_t left = written;
  while (!peer.queue.empty()) {
    const auto& message = peer.queue.front();
    const size_t rest = sizeof(Header) + message.header.bytes - peer.done;
    if (left < rest) {
      peer.done += left;
      break;
    }
    left -= rest;
    peer.done = 0;
    --*message.pending;
    peer.queue.pop_front();
  }
  return written;
}

// What the first messages lack.
size_t TcpNetwork::write_some(Outgoing& peer) {
  iovec parts[kMaxParts];
  size_t count = 0;
  const auto add = [&](const void* data, size_t bytes) {
    if (bytes) parts[count++] = {const_cast<void*>(data), bytes};
  };
  size_t skip = peer.done;
  for (auto message = peer.queue.begin(); message != peer.queue.end() && count + 2 <= kMaxParts; ++message) {
    if (skip < sizeof(Header)) add(reinterpret_cast<const char*>(&message->header) + skip, sizeof(Header) - skip);
    const size_t of_data = skip - std::min(skip, sizeof(Header));
    add(message->data + of_data, message->header.bytes - of_data);
    skip = 0;
  }
  return peer.sender.write(parts, count);
}

// --- receiving

// Reads into the peer's buffer.
size_t TcpNetwork::fill(int from) {
  auto& peer = incoming_[from];
  std::memmove(peer.buffer.data(), peer.buffer.data() + peer.begin, peer.end - peer.begin);
  peer.end -= peer.begin;
  peer.begin = 0;
  const size_t got = peer.receiver.read(peer.buffer.data() + peer.end, peer.buffer.size() - peer.end);
  peer.end += got;
  return got;
}

// True when the connection that the rank has opened is there.
bool TcpNetwork::open_receiver(int from, bool looks) {
  auto& peer = incoming_[from];
  if (peer.receiver.is_open()) return true;
  peer.receiver = connector_->accept(from, Channel::collectives, looks);
  if (!peer.receiver.is_open()) return false;
  peer.buffer.resize(Incoming::kRoom);
  readiness_.add(peer.receiver.descriptor(), from);
  return true;
}

// Takes the next message's header from the buffer, past questions that are answered; true when there is one.
bool TcpNetwork::read_header(int from) {
  auto& peer = incoming_[from];
  do {
    if (!peer.in_header && peer.end - peer.begin >= sizeof(Header)) {
      std::memcpy(&peer.header, peer.buffer.data() + peer.begin, sizeof(Header));
      peer.begin += sizeof(Header);
      peer.in_header = true;
    }
  } while (peer.in_header && answer(from));
  return peer.in_header;
}

// True when the message whose header is in the buffer is expected.
bool TcpNetwork::begin_message(int from) {
  auto& peer = incoming_[from];
  if (!read_header(from)) return false;
  const auto& header = peer.header;
  if (header.tag.phase == kQuestion) return false;  // of a later operation
  const auto same_operation = [&](const Expected& one) { return one.tag.operation == header.tag.operation; };
  const auto operation = std::find_if(peer.expected.begin(), peer.expected.end(), same_operation);
  // Messages come operation by operation, as they are expected.  So one of another operation is wrong, too: its sender
  // has another root, for instance, and this rank is past that operation, for which nothing was expected.
  const auto& wanted = operation == peer.expected.end() ? peer.expected.front() : *operation;
  if (wanted.signature != header.signature) throw header.signature.mismatch(members_, from, wanted.signature);
  const auto found = std::find_if(peer.expected.begin(), peer.expected.end(),
                                  [&](const Expected& one) { return one.tag == header.tag; });
  if (found == peer.expected.end()) return false;
  if (found->bytes != header.bytes) throw mismatch_of_sizes(members_, from, header.bytes, found->bytes);
  std::rotate(peer.expected.begin(), found, found + 1);
  peer.in_header = false;
  peer.in_message = true;
  peer.done = 0;
  return true;
}

size_t TcpNetwork::read_from(int from, bool looks) {
  if (!lost_.empty()) return 0;
  try {
    return open_receiver(from, looks) ? read_expected(from) : 0;
  } catch (const ConnectionLost& error) {
    lose(from, error.what());
    return 0;
  }
}

size_t TcpNetwork::read_expected(int from) {
  size_t moved = 0;
  auto& peer = incoming_[from];
  while (!peer.expected.empty() && moved < kTurn) {
    if (!peer.in_message && !begin_message(from)) {
      if (peer.in_header) break;
      const size_t got = fill(from);
      if (got == 0) break;
      moved += got;
      continue;
    }
    auto& message = peer.expected.front();
    const size_t buffered = std::min(peer.end - peer.begin, message.bytes - peer.done);
    std::memcpy(message.data + peer.done, peer.buffer.data() + peer.begin, buffered);
    peer.begin += buffered;
    peer.done += buffered;
    if (const size_t rest = message.bytes - peer.done) {  // and nothing is left in the buffer
      peer.begin = peer.end = 0;
      const bool patient = message.signature.bytes >= kLeastForPatience;
      const size_t got = peer.receiver.read(message.data + peer.done, rest, patient,
                                            {peer.buffer.data(), peer.buffer.size()});
      if (got == 0) break;
      moved += got;
      peer.done += std::min(got, rest);
      peer.end = got - std::min(got, rest);
    }
    if (peer.done == message.bytes) {
      --*message.pending;
      peer.expected.erase(peer.expected.begin());
      peer.in_message = false;
      moved += 1;
    }
  }
  return moved;
}

void TcpNetwork::check_unasked() {
  for (size_t from = 0; current_ && from < incoming_.size(); ++from) {
    auto& peer = incoming_[from];
    const bool is_expected = !peer.expected.empty();
    if (is_expected && (lost_.empty() || peer.in_message)) continue;  // read_from() compares, or has compared
    try {
      if (!open_receiver(from)) continue;
      if (!read_header(from)) fill(from);
    } catch (const ConnectionLost&) {
      continue;  // nobody waits for it, or what is lost is known
    }
    if (is_expected) {
      begin_message(from);
    } else if (read_header(from)) {
      const auto& signature = peer.header.signature;
      const bool is_late = signature.sequence > current_->sequence;
      if (!is_late && signature != *current_) throw signature.mismatch(members_, from, *current_);
    }
  }
}

}  // namespace cpulaunch
