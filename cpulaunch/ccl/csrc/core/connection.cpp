#include "connection.hpp"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

namespace cpulaunch {

namespace {

constexpr uint64_t kMagic = 0x33656863756e616c;  // and the version of what follows
constexpr int kRtoMaxMs = 44;  // TCP_RTO_MAX_MS, which headers of today rarely have
// One call writes up to 512 KB of a message, with the headers of some.  A longer one would delay what arrives over the
// connection, such as acknowledgements: an all_reduce of 4 MB on two hosts takes 0.74 times as long with this limit.
constexpr size_t kMostAtOnce = 528 << 10;
// A patient reader pauses for this time, in which a fast connection brings about kLeastToRest.
constexpr std::chrono::microseconds kRest{20};
constexpr size_t kLeastToRest = 128 << 10;       // if fewer bytes are missing, the reader doesn't pause

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR || error == EINPROGRESS;
}

}  // namespace

bool is_hung_up(int descriptor) {
  pollfd entry{descriptor, POLLRDHUP, 0};
  return poll(&entry, 1, 0) == 1;
}

void set_patience(int descriptor) {
  constexpr int kLongest = 1000, kNever = std::numeric_limits<int>::max();
  if (setsockopt(descriptor, IPPROTO_TCP, kRtoMaxMs, &kLongest, sizeof(kLongest)) != 0) return;
  setsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, &kNever, sizeof(kNever));
}

Hello Hello::of(const std::string& key, int rank, int to, Channel channel, bool has_opened) {
  const auto text = std::string(has_opened ? "opens " : "answers ") + std::to_string(rank) + " " + std::to_string(to) +
                    " " + std::to_string(static_cast<int>(channel));
  return {kMagic, rank, channel, prove(key, text)};
}

// --- one end

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  rests_until_ = other.rests_until_;
  return *this;
}

Socket::~Socket() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

size_t Socket::read(char* data, size_t bytes, bool patient, iovec more) {
  patient = patient && bytes >= kLeastToRest;
  if (patient && std::chrono::steady_clock::now() < rests_until_) return 0;
  iovec parts[] = {{data, bytes}, more};
  msghdr call{};
  call.msg_iov = parts;
  call.msg_iovlen = more.iov_len ? 2 : 1;
  const auto got = recvmsg(descriptor_, &call, MSG_DONTWAIT);
  if (patient && got < static_cast<ssize_t>(bytes)) rests_until_ = std::chrono::steady_clock::now() + kRest;
  if (got > 0) return got;
  if (got == 0) throw ConnectionLost("it was closed there");
  if (!would_block(errno)) throw ConnectionLost(std::strerror(errno));
  return 0;
}

size_t Socket::write(const iovec* parts, size_t count) {
  iovec first[kMaxParts];
  msghdr call{};
  call.msg_iov = first;
  for (size_t left = kMostAtOnce; left && call.msg_iovlen < count; ++call.msg_iovlen) {
    auto& part = first[call.msg_iovlen] = parts[call.msg_iovlen];
    part.iov_len = std::min(part.iov_len, left);
    left -= part.iov_len;
  }
  const auto result = sendmsg(descriptor_, &call, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (result < 0 && !would_block(errno)) throw ConnectionLost(std::strerror(errno));
  return std::max<ssize_t>(result, 0);
}

bool Socket::has_ended() const {
  char next;
  const auto got = recv(descriptor_, &next, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && !would_block(errno));
}

// After set_patience(), the kernel would give up soon after the connection is closed if the other rank doesn't read.
// So it gets its usual limit back, and then goes on for about two minutes.
size_t Socket::unacknowledged() const {
  constexpr int kUsual = 120'000;  // milliseconds
  int bytes = 0;
  if (ioctl(descriptor_, SIOCOUTQ, &bytes) != 0 || is_hung_up(descriptor_)) return 0;
  if (bytes) setsockopt(descriptor_, IPPROTO_TCP, kRtoMaxMs, &kUsual, sizeof(kUsual));
  return bytes;
}

// --- a connection

Connection::Connection(int descriptor, const Hello& own, const Hello& others, std::string name)
    : socket_(descriptor), hellos_(std::make_unique<Hellos>()) {
  hellos_->own = own;
  hellos_->others = others;
  hellos_->name = std::move(name);
}

Connection::Connection(Socket socket, const Hello& own)
    : socket_(std::move(socket)), hellos_(std::make_unique<Hellos>()) {
  hellos_->own = own;
  hellos_->heard = sizeof(Hello);
}

void Connection::forget_hellos() {
  if (hellos_->said == sizeof(Hello) && has_heard()) hellos_.reset();
}

void Connection::fail(const ConnectionLost& error) const {
  const bool reached = !hellos_ || hellos_->said > 0 || hellos_->name.empty();
  throw ConnectionLost((reached ? "" : hellos_->name + " can't be reached: ") + error.what());
}

size_t Connection::read(char* data, size_t bytes, bool patient, iovec more) {
  return has_heard() ? socket_.read(data, bytes, patient, more) : 0;
}

void Connection::hear() {
  auto& its = *hellos_;
  try {
    its.heard += socket_.read(reinterpret_cast<char*>(&its.come) + its.heard, sizeof(Hello) - its.heard);
  } catch (const ConnectionLost& error) {
    fail(error);
  }
  if (!has_heard()) return;
  if (!(its.come == its.others)) {
    its.heard = 0;
    throw ConnectionLost(its.name + " is not a rank of the group");
  }
  forget_hellos();
}

size_t Connection::write(const iovec* parts, size_t count) {
  if (!hellos_ || hellos_->said == sizeof(Hello)) return socket_.write(parts, count);
  auto& its = *hellos_;
  const size_t left = sizeof(Hello) - its.said;
  iovec all[Socket::kMaxParts] = {{reinterpret_cast<char*>(&its.own) + its.said, left}};
  count = std::min(count, Socket::kMaxParts - 1);
  std::copy_n(parts, count, all + 1);
  size_t written = 0;
  try {
    written = socket_.write(all, count + 1);
  } catch (const ConnectionLost& error) {
    fail(error);
  }
  const size_t of_hello = std::min(written, left);
  its.said += of_hello;
  forget_hellos();
  return written - of_hello;
}

void Connection::greet() {
  if (hellos_ && hellos_->said < sizeof(Hello)) write(nullptr, 0);
}

}  // namespace cpulaunch
