#include "network_tcp.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace cpulaunch {

namespace {

constexpr size_t kMaxParts = 16;             // of what one call of the kernel sends
constexpr size_t kTurn = 1 << 20;            // bytes of one peer after which another one's turn comes

}  // namespace

void TcpNetwork::close() {
  connector_->close();
  outgoing_.clear();
  incoming_.clear();
  streams_.clear();
  sending_.clear();
  receiving_.clear();
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

// Where there are many connections, those with nothing to read take no call of the kernel; neither do those that have
// not been opened, but for one of them.
size_t TcpNetwork::read_from_ready() {
  size_t moved = 0;
  bool looks = true;
  const auto* ready = readiness_.is_asked() && !receiving_.empty() ? &readiness_.ask(incoming_.size()) : nullptr;
  // A peer's turn may end its place in this list, or come again in a later call.
  keep_if(receiving_, [&](int from) {
    const auto& peer = incoming_[from];
    const auto& stream = streams_[from];
    const bool is_known = stream.receiver.is_open(), has_rest = peer.in_header || stream.begin < stream.end;
    if (!ready || !is_known || has_rest || (*ready)[from]) moved += read_from(from, looks);
    looks = looks && is_known;
    return !peer.expected.empty();
  });
  return moved;
}

size_t TcpNetwork::progress() {
  size_t moved = read_from_ready();
  keep_if(sending_, [&](int to) {
    moved += write_to(to);
    return outgoing_[to].listed = !outgoing_[to].queue.empty();
  });
  check_when_idle(moved);
  return moved;
}

std::string TcpNetwork::why_lost(int from) {
  auto& sender = outgoing_[from].sender;
  if (open_receiver(from)) return "";  // who reads from it is told
  const bool left = incoming_[from].silent.has_left(*connector_, from, Channel::collectives, sender);
  return left ? "it was closed there" : "";
}

void TcpNetwork::send_question(int to, const Sent& question) {
  auto& sender = outgoing_[to].sender;
  try {
    if (!sender.is_open()) sender = connector_->connect(to, Channel::collectives);
  } catch (const std::runtime_error&) {
    return;  // whether it has left is seen elsewhere
  }
  incoming_[to].asked = question.header.tag.operation;
  enqueue(to, question, /*more_follow=*/false);
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
  auto& stream = streams_[from];
  std::memmove(stream.buffer.data(), stream.buffer.data() + stream.begin, stream.end - stream.begin);
  stream.end -= stream.begin;
  stream.begin = 0;
  const size_t got = stream.receiver.read(stream.buffer.data() + stream.end, stream.buffer.size() - stream.end);
  stream.end += got;
  return got;
}

// True when the connection that the rank has opened is there.
bool TcpNetwork::open_receiver(int from, bool looks) {
  auto& stream = streams_[from];
  if (stream.receiver.is_open()) return true;
  stream.receiver = connector_->accept(from, Channel::collectives, looks);
  if (!stream.receiver.is_open()) return false;
  stream.buffer.resize(Stream::kRoom);
  readiness_.add(stream.receiver.descriptor(), from);
  return true;
}

bool TcpNetwork::take_header(int from) {
  auto& stream = streams_[from];
  if (stream.end - stream.begin < sizeof(Header)) return false;
  std::memcpy(&incoming_[from].header, stream.buffer.data() + stream.begin, sizeof(Header));
  stream.begin += sizeof(Header);
  return true;
}

bool TcpNetwork::look(int from) {
  if (!open_receiver(from)) return false;
  if (!read_header(from)) fill(from);
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
  auto& stream = streams_[from];
  while (!peer.expected.empty() && moved < kTurn) {
    if (!peer.in_message && !begin_message(from)) {
      if (peer.in_header) break;
      const size_t got = fill(from);
      if (got == 0) break;
      moved += got;
      continue;
    }
    auto& message = peer.expected.front();
    const size_t buffered = std::min(stream.end - stream.begin, message.bytes - stream.done);
    std::memcpy(message.data + stream.done, stream.buffer.data() + stream.begin, buffered);
    stream.begin += buffered;
    stream.done += buffered;
    if (const size_t rest = message.bytes - stream.done) {  // and nothing is left in the buffer
      stream.begin = stream.end = 0;
      const bool patient = message.signature.bytes >= kLeastForPatience;
      const size_t got = stream.receiver.read(message.data + stream.done, rest, patient,
                                              {stream.buffer.data(), stream.buffer.size()});
      if (got == 0) break;
      moved += got;
      stream.done += std::min(got, rest);
      stream.end = got - std::min(got, rest);
    }
    if (stream.done == message.bytes) {
      --*message.pending;
      peer.expected.erase(peer.expected.begin());
      stream.done = 0;
      peer.in_message = false;
      moved += 1;
    }
  }
  return moved;
}

}  // namespace cpulaunch
