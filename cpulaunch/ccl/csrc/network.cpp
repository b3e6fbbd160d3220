#include "network.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace cpulaunch {

namespace {

constexpr uint64_t kMagic = 0x31656863756e616c;  // and the version of what follows
constexpr int kBacklog = 1024;                   // connections that have not been accepted
constexpr size_t kMaxStrangers = 64;             // connections without a hello, beside those of all ranks
constexpr size_t kMaxParts = 16;                 // of what one call of the kernel sends
constexpr size_t kTurn = 1 << 20;                // bytes of one peer after which another one's turn comes

struct ResolvedAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  ResolvedAddress(const std::string& ip, int port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    const int error = getaddrinfo(ip.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (error) throw std::runtime_error("'" + ip + "' is not an address: " + gai_strerror(error));
    std::memcpy(&storage, found->ai_addr, found->ai_addrlen);
    length = found->ai_addrlen;
    freeaddrinfo(found);
  }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

int open_socket(const ResolvedAddress& address) {
  const int descriptor = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) throw std::runtime_error(std::string("no socket: ") + std::strerror(errno));
  return descriptor;
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR || error == EINPROGRESS; }

}  // namespace

Network::Listener Network::listen(const std::string& ip) {
  ResolvedAddress address(ip, 0);
  const int descriptor = open_socket(address);
  if (bind(descriptor, address.get(), address.length) != 0 || ::listen(descriptor, kBacklog) != 0 ||
      getsockname(descriptor, address.get(), &address.length) != 0) {
    const std::string reason = std::strerror(errno);
    ::close(descriptor);
    throw std::runtime_error("this host can't listen on " + ip + ": " + reason);
  }
  const bool v6 = address.storage.ss_family == AF_INET6;
  const auto port = v6 ? reinterpret_cast<sockaddr_in6*>(address.get())->sin6_port
                       : reinterpret_cast<sockaddr_in*>(address.get())->sin_port;
  return {descriptor, ntohs(port)};
}

Network::Network(int rank, Listener listener, std::vector<Address> addresses, Token token)
    : rank_(rank),
      listener_(listener),
      addresses_(std::move(addresses)),
      token_(std::move(token)),
      outgoing_(addresses_.size()),
      incoming_(addresses_.size()) {
  if (token_.size() != kTokenSize) throw std::runtime_error("a group's token has 16 bytes");
}

void Network::close() {
  for (const auto& each : outgoing_) {
    if (each.descriptor >= 0) ::close(each.descriptor);
  }
  for (const auto& each : incoming_) {
    if (each.descriptor >= 0) ::close(each.descriptor);
  }
  for (const auto& each : unknown_) ::close(each.descriptor);
  if (listener_.descriptor >= 0) ::close(listener_.descriptor);
  listener_.descriptor = -1;
  outgoing_.clear();
  incoming_.clear();
  unknown_.clear();
  sending_.clear();
  receiving_.clear();
}

void Network::send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes, int& pending) {
  ++pending;
  auto& peer = outgoing_[to];
  peer.queue.push_back({{tag, signature, bytes}, data, &pending});
  if (!peer.listed) sending_.push_back(to);
  peer.listed = true;
  if (peer.queue.size() == 1) write_to(to);
}

void Network::receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes, int& pending) {
  ++pending;
  auto& peer = incoming_[from];
  if (peer.expected.empty()) receiving_.push_back(from);
  peer.expected.push_back({tag, signature, data, bytes, &pending});
}

size_t Network::progress() {
  size_t moved = 0;
  // A peer's turn may end its place in these lists, or come again in a later call.
  for (size_t i = 0; i < receiving_.size();) {
    const int from = receiving_[i];
    moved += read_from(from);
    if (incoming_[from].expected.empty()) {
      receiving_[i] = receiving_.back();
      receiving_.pop_back();
    } else {
      ++i;
    }
  }
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
  const bool unconnected = std::any_of(receiving_.begin(), receiving_.end(),
                                       [&](int from) { return incoming_[from].descriptor < 0; });
  return unconnected ? moved + accept_connections() : moved;
}

std::vector<int> Network::awaited() const {
  auto ranks = receiving_.empty() ? sending_ : receiving_;
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

void Network::lose(int peer, const std::string& what) {
  if (lost_.empty()) lost_ = "the connection to rank " + std::to_string(peer) + " of this group is lost: " + what;
}

// --- sending

void Network::connect(int to) {
  ResolvedAddress own(addresses_[rank_].ip, 0), address(addresses_[to].ip, addresses_[to].port);
  auto& peer = outgoing_[to];
  peer.descriptor = open_socket(address);
  const int on = 1;
  setsockopt(peer.descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // From the address that the others know, so that the data takes the chosen interface.  The port is chosen when the
  // destination is known: without that, all connections of a host together could be no more than it has ports.
  setsockopt(peer.descriptor, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
  if (bind(peer.descriptor, own.get(), own.length) != 0 ||
      (::connect(peer.descriptor, address.get(), address.length) != 0 && !would_block(errno))) {
    lose(to, addresses_[to].ip + " can't be reached: " + std::strerror(errno));
  }
}

// Returns the bytes written; takes what is complete off the queue.
size_t Network::write_to(int to) {
  auto& peer = outgoing_[to];
  if (peer.queue.empty() || !lost_.empty()) return 0;
  if (peer.descriptor < 0) connect(to);
  iovec parts[kMaxParts];
  size_t count = 0;
  const auto add = [&](const void* data, size_t bytes) {
    if (bytes) parts[count++] = {const_cast<void*>(data), bytes};
  };
  Hello hello{kMagic, {}, rank_, 0};
  std::memcpy(hello.token, token_.data(), kTokenSize);
  add(reinterpret_cast<const char*>(&hello) + sizeof(hello) - peer.hello_left, peer.hello_left);
  size_t skip = peer.done;
  for (auto message = peer.queue.begin(); message != peer.queue.end() && count + 2 <= kMaxParts; ++message) {
    if (skip < sizeof(Header)) add(reinterpret_cast<const char*>(&message->header) + skip, sizeof(Header) - skip);
    const size_t of_data = skip - std::min(skip, sizeof(Header));
    add(message->data + of_data, message->header.bytes - of_data);
    skip = 0;
  }
  msghdr call{};
  call.msg_iov = parts;
  call.msg_iovlen = count;
  const auto written = sendmsg(peer.descriptor, &call, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (written < 0) {
    if (!would_block(errno)) lose(to, std::strerror(errno));
    return 0;
  }
  size_t left = written;
  const size_t of_hello = std::min(left, peer.hello_left);
  peer.hello_left -= of_hello;
  left -= of_hello;
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

// --- receiving

// Returns how many ranks have come.  What strangers do is no progress.
size_t Network::accept_connections() {
  const size_t most = kMaxStrangers + incoming_.size();
  for (size_t accepted = 0; accepted < most; ++accepted) {
    const int descriptor = accept4(listener_.descriptor, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (descriptor < 0) {
      const int error = errno;
      const bool full = error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
      pollfd waiting{listener_.descriptor, POLLIN, 0};  // the kernel says EMFILE even where nobody waits
      if (full && poll(&waiting, 1, 0) > 0 && lost_.empty()) {
        lost_ = std::string("other ranks can't connect to this one: ") + std::strerror(error);
      }
      break;
    }
    unknown_.push_back({descriptor, 0, {}});
  }
  const auto known = static_cast<size_t>(
      std::count_if(unknown_.begin(), unknown_.end(), [this](auto& unknown) { return read_hello(unknown); }));
  unknown_.erase(std::remove_if(unknown_.begin(), unknown_.end(), [](const auto& one) { return one.descriptor < 0; }),
                 unknown_.end());
  // Those that have been silent for longest make room for the ones to come.
  const auto surplus = unknown_.begin() + static_cast<ssize_t>(unknown_.size() - std::min(unknown_.size(), most));
  for (auto each = unknown_.begin(); each != surplus; ++each) ::close(each->descriptor);
  unknown_.erase(unknown_.begin(), surplus);
  return known;
}

// Closes the connections of those who don't know the token.  True when a rank has come.
bool Network::read_hello(Unknown& unknown) {
  const auto got = recv(unknown.descriptor, reinterpret_cast<char*>(&unknown.hello) + unknown.done,
                        sizeof(Hello) - unknown.done, MSG_DONTWAIT);
  if (got < 0 && would_block(errno)) return false;
  unknown.done += std::max<ssize_t>(got, 0);
  const auto& hello = unknown.hello;
  if (got > 0 && unknown.done < sizeof(Hello)) return false;
  const bool known = got > 0 && hello.magic == kMagic && hello.rank >= 0 &&
                     hello.rank < static_cast<int>(incoming_.size()) && incoming_[hello.rank].descriptor < 0 &&
                     std::memcmp(hello.token, token_.data(), kTokenSize) == 0;
  if (known) {
    incoming_[hello.rank].descriptor = unknown.descriptor;
    incoming_[hello.rank].buffer.resize(Incoming::kRoom);
  } else {
    ::close(unknown.descriptor);
  }
  unknown.descriptor = -1;
  return known;
}

size_t Network::read_some(int from, char* data, size_t bytes) {
  const auto got = recv(incoming_[from].descriptor, data, bytes, MSG_DONTWAIT);
  if (got > 0) return got;
  if (got == 0) {
    lose(from, "it was closed there");
  } else if (!would_block(errno)) {
    lose(from, std::strerror(errno));
  }
  return 0;
}

// Reads into the peer's buffer.
size_t Network::fill(int from) {
  auto& peer = incoming_[from];
  std::memmove(peer.buffer.data(), peer.buffer.data() + peer.begin, peer.end - peer.begin);
  peer.end -= peer.begin;
  peer.begin = 0;
  const size_t got = read_some(from, peer.buffer.data() + peer.end, peer.buffer.size() - peer.end);
  peer.end += got;
  return got;
}

// True when the message whose header is in the buffer is expected.
bool Network::begin_message(int from) {
  auto& peer = incoming_[from];
  if (!peer.in_header) {
    if (peer.end - peer.begin < sizeof(Header)) return false;
    std::memcpy(&peer.header, peer.buffer.data() + peer.begin, sizeof(Header));
    peer.begin += sizeof(Header);
    peer.in_header = true;
  }
  const auto& header = peer.header;
  const auto same_operation = [&](const Expected& one) { return one.tag.operation == header.tag.operation; };
  const auto operation = std::find_if(peer.expected.begin(), peer.expected.end(), same_operation);
  if (operation != peer.expected.end() && operation->signature != header.signature) {
    throw std::runtime_error(header.signature.mismatch(from, operation->signature));
  }
  const auto found = std::find_if(peer.expected.begin(), peer.expected.end(),
                                  [&](const Expected& one) { return one.tag == header.tag; });
  if (found == peer.expected.end()) return false;
  if (found->bytes != header.bytes) {
    throw std::runtime_error("rank " + std::to_string(from) + " of the group sends " + std::to_string(header.bytes) +
                             " bytes where this rank expects " + std::to_string(found->bytes) + ", in " +
                             header.signature.text());
  }
  std::rotate(peer.expected.begin(), found, found + 1);
  peer.in_header = false;
  peer.in_message = true;
  peer.done = 0;
  return true;
}

size_t Network::read_from(int from) {
  size_t moved = 0;
  auto& peer = incoming_[from];
  if (peer.descriptor < 0 || !lost_.empty()) return 0;
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
    if (peer.done < message.bytes) {
      const size_t got = read_some(from, message.data + peer.done, message.bytes - peer.done);
      if (got == 0) break;
      moved += got;
      peer.done += got;
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

}  // namespace cpulaunch
