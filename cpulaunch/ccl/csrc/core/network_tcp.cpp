#include "network_tcp.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace cpulaunch {

namespace {

constexpr size_t kMaxParts = 16;   // of memory that one system call sends
constexpr size_t kTurn = 1 << 20;  // after this many bytes from one peer, others have their turn

}  // namespace

TcpNetwork::TcpNetwork(const Layout& layout, std::shared_ptr<Connector> connector, size_t number, size_t networks)
    : MessageNetwork(layout, std::move(connector)), outgoing_(layout.size), streams_(layout.size),
      readiness_(layout.size) {
  sending_.reserve(layout.size);
  for (const size_t host : layout.host_numbers) {
    channels_.push_back(channel_of_stripe((number + networks - host % networks) % networks));
    links_.emplace_back(*connector_, static_cast<int>(links_.size()), channels_.back(),
                        layout.shares_connections);
  }
}

void TcpNetwork::close() {
  connector_->close();
  links_.clear();
  outgoing_.clear();
  incoming_.clear();
  streams_.clear();
  sending_.clear();
  receiving_.clear();
}

void TcpNetwork::send_stripe(int to, const Header& header, const char* data, Range stripe, int& pending,
                             bool more_follow) {
  enqueue(to, {header, data + stripe.begin, stripe.size(), &pending}, more_follow);
}

void TcpNetwork::receive_stripe(int from, const Header& header, char* data, Range stripe, int& pending) {
  under_way_ += stripe.size();
  expect(from, {header, data + stripe.begin, stripe.size(), &pending});
}

// Several networks, each in a thread of its own, may complete stripes of the same message at the same time.  Relaxed:
// the thread that reads the counter has waited for those threads.
void TcpNetwork::complete(size_t bytes, int* pending) {
  under_way_ -= bytes;
  __atomic_fetch_sub(pending, 1, __ATOMIC_RELAXED);
}

void TcpNetwork::enqueue(int to, const Sent& message, bool more_follow) {
  ++*message.pending;
  under_way_ += message.bytes;
  auto& peer = outgoing_[to];
  peer.queue.push_back(message);
  if (!peer.listed) sending_.push_back(to);
  peer.listed = true;
  if (peer.queue.size() == 1 && !more_follow) write_to(to);
}

// Looking for new connections takes one system call for all ranks.
void TcpNetwork::look_once() {
  if (std::exchange(looks_, false)) connector_->look();
}

// If there are many connections, those with nothing to read take no system call.
size_t TcpNetwork::read_from_ready() {
  size_t moved = 0;
  const auto* ready = readiness_.is_asked() && !receiving_.empty() ? &readiness_.ask() : nullptr;
  // A peer from which nothing more is expected leaves the list.
  keep_if(receiving_, [&](int from) {
    const auto& peer = incoming_[from];
    const auto& stream = streams_[from];
    const auto& link = links_[from];
    const bool is_watched = link.is_settled() && stream.descriptor == link.descriptor();
    const bool has_rest = peer.in_header || stream.begin < stream.end;
    if (!ready || !is_watched || has_rest || (*ready)[from]) moved += read_from(from);
    return !peer.expected.empty();
  });
  return moved;
}

// Writes first: if this rank then finds that another one calls something else, that rank can find it, too.
size_t TcpNetwork::progress() {
  looks_ = true;
  size_t moved = 0;
  keep_if(sending_, [&](int to) {
    moved += write_to(to);
    return outgoing_[to].listed = !outgoing_[to].queue.empty();
  });
  moved += read_from_ready();
  check_when_idle(moved);
  return moved;
}

std::string TcpNetwork::why_lost(int from) {
  const bool reports = links_[from].is_settled();  // read_from() does
  return !reports && links_[from].has_left() ? "it was closed there" : "";
}

bool TcpNetwork::leave() {
  size_t unacknowledged = 0;
  for (const auto& each : links_) unacknowledged += each.unacknowledged();
  return !lost_.empty() || delivery_.is_over(unacknowledged);
}

// Messages begin with the first channel, so questions are needed there only.
void TcpNetwork::send_question(int to, const Sent& question) {
  if (channels_[to] != Channel::collectives) return;
  try {
    links_[to].open();
  } catch (const std::runtime_error&) {
    return;  // why_lost() finds out whether the rank has left
  }
  incoming_[to].asked = question.header.tag.operation;
  enqueue(to, question, /*more_follow=*/false);
}

// --- sending

// Returns the number of bytes written.  Removes complete messages from the queue.
size_t TcpNetwork::write_to(int to) {
  auto& peer = outgoing_[to];
  if (peer.queue.empty() || !lost_.empty()) return 0;
  size_t written = 0;
  try {
    if (!links_[to].is_open()) look_once();
    written = write_some(to);
  } catch (const ConnectionLost& error) {
    // A rank that can't get a question any more may have sent everything before it left.
    const auto is_question = [](const Sent& message) { return message.header.tag.phase == kQuestion; };
    if (!std::all_of(peer.queue.begin(), peer.queue.end(), is_question)) lose(to, error.what());
    peer.queue.clear();
    peer.done = 0;
  }
  if (written == 0) return 0;
  size_t left = written;
  while (!peer.queue.empty()) {
    const auto& message = peer.queue.front();
    const size_t rest = sizeof(Header) + message.bytes - peer.done;
    if (left < rest) {
      peer.done += left;
      break;
    }
    left -= rest;
    peer.done = 0;
    complete(message.bytes, message.pending);
    peer.queue.pop_front();
  }
  return written;
}

// Writes what the first messages still need, as far as the kernel takes it.
size_t TcpNetwork::write_some(int to) {
  auto& peer = outgoing_[to];
  iovec parts[kMaxParts];
  size_t count = 0;
  const auto add = [&](const void* data, size_t bytes) {
    if (bytes) parts[count++] = {const_cast<void*>(data), bytes};
  };
  size_t skip = peer.done;
  for (auto message = peer.queue.begin(); message != peer.queue.end() && count + 2 <= kMaxParts; ++message) {
    if (skip < sizeof(Header)) add(reinterpret_cast<const char*>(&message->header) + skip, sizeof(Header) - skip);
    const size_t of_data = skip - std::min(skip, sizeof(Header));
    add(message->data + of_data, message->bytes - of_data);
    skip = 0;
  }
  return links_[to].write(parts, count);
}

// --- receiving

// Reads into the peer's buffer.
size_t TcpNetwork::fill(int from) {
  auto& stream = streams_[from];
  stream.buffer.resize(Stream::kRoom);
  std::memmove(stream.buffer.data(), stream.buffer.data() + stream.begin, stream.end - stream.begin);
  stream.end -= stream.begin;
  stream.begin = 0;
  const size_t got = links_[from].read(stream.buffer.data() + stream.end, stream.buffer.size() - stream.end);
  stream.end += got;
  watch(from);
  return got;
}

void TcpNetwork::watch(int from) {
  if (!links_[from].is_settled()) return;
  const int descriptor = links_[from].descriptor();
  if (descriptor != streams_[from].descriptor) readiness_.add(descriptor, from);
  streams_[from].descriptor = descriptor;
}

bool TcpNetwork::take_header(int from) {
  auto& stream = streams_[from];
  if (stream.end - stream.begin < sizeof(Header)) return false;
  std::memcpy(&incoming_[from].header, stream.buffer.data() + stream.begin, sizeof(Header));
  stream.begin += sizeof(Header);
  return true;
}

bool TcpNetwork::look(int from) {
  if (channels_[from] != Channel::collectives) return false;
  if (!links_[from].is_settled()) connector_->look();
  if (!links_[from].find()) return false;
  if (!read_header(from)) fill(from);
  return true;
}

size_t TcpNetwork::read_from(int from) {
  if (!lost_.empty()) return 0;
  try {
    if (!links_[from].is_settled()) look_once();
    return read_expected(from);
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
    if (const size_t rest = message.bytes - stream.done) {  // the buffer is empty
      stream.begin = stream.end = 0;
      const bool patient = message.header.signature.bytes >= kLeastForPatience;
      const size_t got = links_[from].read(message.data + stream.done, rest, patient,
                                           {stream.buffer.data(), stream.buffer.size()});
      if (got == 0) break;
      moved += got;
      stream.done += std::min(got, rest);
      stream.end = got - std::min(got, rest);
    }
    if (stream.done == message.bytes) {
      complete(message.bytes, message.pending);
      peer.expected.pop_front();
      stream.done = 0;
      peer.in_message = false;
      moved += 1;
    }
  }
  return moved;
}

}  // namespace cpulaunch
