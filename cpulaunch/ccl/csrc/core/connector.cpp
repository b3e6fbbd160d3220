#include "connector.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

namespace cpulaunch {

namespace {

constexpr uint64_t kMagic = 0x32656863756e616c;  // and the version of what follows
constexpr int kBacklog = 1024;                   // connections that have not been accepted
// At most this many unsent bytes of a connection wait in the kernel: so few that they may still be in the processor's
// cache when they are sent.  Data in transit doesn't count.
constexpr int kMaxUnsent = 256 << 10;
// A patient reader pauses for this time, in which a fast connection brings about kLeastToRest.
constexpr std::chrono::microseconds kRest{20};
constexpr size_t kLeastToRest = 128 << 10;       // if fewer bytes are missing, the reader doesn't pause
constexpr size_t kMaxStrangers = 64;             // connections without a hello, beside those of all ranks
constexpr std::chrono::seconds kHelloTime{3};    // for a connection from the address of a rank
// Data that a rank has sent before it left arrives within this time, or never.
constexpr std::chrono::seconds kLatest{2};

// Where this process listens; 0: on any port.
std::atomic<int> first_port{0};
std::atomic<int> last_port{0};

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

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR || error == EINPROGRESS;
}

constexpr int kSend = MSG_NOSIGNAL | MSG_DONTWAIT;

// In errors.
std::string name_of(const Connector::Address& address) {
  return address.from.empty() ? address.ip : address.ip + ", from " + address.from + ",";
}

}  // namespace

bool is_hung_up(int descriptor) {
  pollfd entry{descriptor, POLLRDHUP, 0};
  return poll(&entry, 1, 0) == 1;
}

void set_patience(int descriptor) {
  constexpr int kRtoMaxMs = 44;  // TCP_RTO_MAX_MS, which headers of today rarely have
  constexpr int kLongest = 1000, kNever = std::numeric_limits<int>::max();
  if (setsockopt(descriptor, IPPROTO_TCP, kRtoMaxMs, &kLongest, sizeof(kLongest)) != 0) return;
  setsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, &kNever, sizeof(kNever));
}

// --- the ends of a connection

Receiver& Receiver::operator=(Receiver&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  rests_until_ = other.rests_until_;
  return *this;
}

Receiver::~Receiver() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

size_t Receiver::read(char* data, size_t bytes, bool patient, iovec more) {
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

size_t Sender::write(const iovec* parts, size_t count) {
  iovec all[kMaxParts];
  size_t filled = 0;
  const size_t hello_left = sizeof(hello_) - hello_done_;
  if (hello_left) all[filled++] = {reinterpret_cast<char*>(&hello_) + hello_done_, hello_left};
  for (size_t i = 0; i < count && filled < kMaxParts; ++i) all[filled++] = parts[i];
  msghdr call{};
  call.msg_iov = all;
  call.msg_iovlen = filled;
  const auto result = sendmsg(descriptor_, &call, kSend);
  if (result < 0 && !would_block(errno)) {
    throw ConnectionLost((hello_done_ ? "" : name_ + " can't be reached: ") + std::strerror(errno));
  }
  const size_t written = std::max<ssize_t>(result, 0);
  const size_t of_hello = std::min(written, hello_left);
  hello_done_ += of_hello;
  return written - of_hello;
}

void Sender::greet() {
  if (hello_done_ < sizeof(hello_)) write(nullptr, 0);
}

// --- how they are made

Connector::Listener Connector::listen(const std::string& ip) {
  for (int port = first_port;; ++port) {
    ResolvedAddress address(ip, port);
    const int descriptor = open_socket(address);
    // Connections of an earlier job that have just ended don't block the port.
    const int on = 1;
    if (port) setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(descriptor, address.get(), address.length) == 0 && ::listen(descriptor, kBacklog) == 0 &&
        getsockname(descriptor, address.get(), &address.length) == 0) {
      const bool v6 = address.storage.ss_family == AF_INET6;
      const auto got = v6 ? reinterpret_cast<sockaddr_in6*>(address.get())->sin6_port
                          : reinterpret_cast<sockaddr_in*>(address.get())->sin_port;
      return {descriptor, ntohs(got)};
    }
    const int error = errno;
    ::close(descriptor);
    if (error == EADDRINUSE && port < last_port) continue;
    const auto ports = port ? ", ports " + std::to_string(first_port) + "-" + std::to_string(last_port) : "";
    throw std::runtime_error("this host can't listen on " + ip + ports + ": " + std::strerror(error));
  }
}

void Connector::listen_within(int first, int last) {
  first_port = first;
  last_port = last;
}

void Connector::choose_sources(std::vector<Address>& addresses, const std::vector<int>& host_of, int rank) {
  std::map<int, std::vector<std::string>> of_host;  // the different ones of each, in the order of its ranks
  std::vector<size_t> numbers;                      // of each rank's among them
  for (size_t each = 0; each < addresses.size(); ++each) {
    auto& all = of_host[host_of[each]];
    const auto found = std::find(all.begin(), all.end(), addresses[each].ip);
    numbers.push_back(found - all.begin());
    if (found == all.end()) all.push_back(addresses[each].ip);
  }
  const auto& own = of_host[host_of[rank]];
  for (size_t each = 0; each < addresses.size(); ++each) {
    if (numbers[each] < own.size()) addresses[each].from = own[numbers[each]];
  }
}

int Connector::reach(const Address& to) {
  ResolvedAddress address(to.ip, to.port);
  const int descriptor = open_socket(address);
  bool reached = true;
  if (!to.from.empty()) {
    // The kernel chooses the port when the destination is known.  Otherwise, all connections of a host together could
    // be no more than it has ports.
    const int on = 1;
    setsockopt(descriptor, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
    ResolvedAddress from(to.from, 0);
    reached = bind(descriptor, from.get(), from.length) == 0;
  }
  if (reached && (::connect(descriptor, address.get(), address.length) == 0 || would_block(errno))) return descriptor;
  const int error = errno;
  ::close(descriptor);
  throw ConnectionLost(name_of(to) + " can't be reached: " + std::strerror(error), error);
}

Hello Hello::of(const std::string& key, int rank, int to, Channel channel) {
  const auto text = std::to_string(rank) + " " + std::to_string(to) + " " + std::to_string(static_cast<int>(channel));
  return {kMagic, rank, channel, prove(key, text)};
}

Connector::Connector(int rank, Listener listener, std::vector<Address> addresses, std::string key, size_t channels)
    : rank_(rank),
      addresses_(std::move(addresses)),
      key_(std::move(key)),
      channels_(channels),
      listener_(listener) {
  if (key_.size() < kLeastKey) throw std::runtime_error("a group's key has 16 bytes or more");
}

void Connector::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (listener_.descriptor >= 0) ::close(listener_.descriptor);
  listener_.descriptor = -1;
  unknown_.clear();
  known_.clear();
}

Sender Connector::connect(int to, Channel channel) {
  const int descriptor = reach(addresses_[to]);
  Sender sender(descriptor, Hello::of(key_, rank_, to, channel), name_of(addresses_[to]));
  const int on = 1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(descriptor, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kMaxUnsent, sizeof(kMaxUnsent));
  set_patience(descriptor);
  return sender;
}

Receiver Connector::accept(int from, Channel channel, bool looks) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (looks) accept_all();
  const auto found = known_.find({from, channel});
  if (found == known_.end()) return Receiver();
  Receiver receiver = std::move(found->second);
  known_.erase(found);
  return receiver;
}

void Connector::accept_all() {
  for (size_t i = 0; i < unknown_.size();) {
    if (read_hello(unknown_[i])) {
      unknown_.erase(unknown_.begin() + i);
    } else {
      ++i;
    }
  }
  const size_t most = kMaxStrangers + channels_ * addresses_.size();
  for (size_t accepted = 0; accepted < most && (unknown_.size() < most || make_room()); ++accepted) {
    sockaddr_storage from{};
    socklen_t length = sizeof(from);
    const int descriptor = accept4(listener_.descriptor, reinterpret_cast<sockaddr*>(&from), &length,
                                   SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (descriptor < 0) {
      const int error = errno;
      const bool full = error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
      pollfd waiting{listener_.descriptor, POLLIN, 0};  // the kernel says EMFILE even where nobody waits
      if (full && poll(&waiting, 1, 0) > 0) {
        throw ConnectionLost(std::string("this rank can't accept it: ") + std::strerror(error));
      }
      break;
    }
    unknown_.push_back({Receiver(descriptor), is_of_group(from)});
    if (read_hello(unknown_.back())) unknown_.pop_back();
  }
}

// Closes the connection that has been silent for longest, preferably one from an address of no rank.  A connection from
// a rank's address may be that rank's, with its hello on the way, so it is closed after kHelloTime only; meanwhile, new
// ones wait in the kernel.  Returns false if there is none to close.
bool Connector::make_room() {
  pollfd waiting{listener_.descriptor, POLLIN, 0};
  if (poll(&waiting, 1, 0) <= 0) return false;  // no connection waits
  auto silent = std::find_if(unknown_.begin(), unknown_.end(), [](const Unknown& each) { return !each.is_near; });
  if (silent == unknown_.end()) {
    silent = unknown_.begin();
    if (Clock::now() - silent->since < kHelloTime) return false;
  }
  unknown_.erase(silent);
  return true;
}

bool Connector::is_of_group(const sockaddr_storage& address) const {
  char ip[INET6_ADDRSTRLEN] = "";
  const void* its = address.ss_family == AF_INET6
                        ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr)
                        : &reinterpret_cast<const sockaddr_in&>(address).sin_addr;
  inet_ntop(address.ss_family, its, ip, sizeof(ip));
  return std::any_of(addresses_.begin(), addresses_.end(), [&](const Address& each) { return each.ip == ip; });
}

// Returns whether the connection is settled: it is in known_, or it was a stranger's.
bool Connector::read_hello(Unknown& unknown) {
  auto& hello = unknown.hello;
  try {
    unknown.done += unknown.receiver.read(reinterpret_cast<char*>(&hello) + unknown.done, sizeof(hello) - unknown.done);
  } catch (const ConnectionLost&) {
    return true;
  }
  if (unknown.done < sizeof(hello)) return false;
  const bool ours = hello.magic == kMagic && hello.rank >= 0 && hello.rank < static_cast<int>(addresses_.size()) &&
                    are_same(hello.proof, Hello::of(key_, hello.rank, rank_, hello.channel).proof);
  const std::pair which(hello.rank, hello.channel);
  if (ours && greeted_.insert(which).second) known_.emplace(which, std::move(unknown.receiver));
  return true;
}

bool Silent::has_left(Connector& connector, int rank, Channel channel, Sender& sender) {
  try {
    if (!sender.is_open()) sender = connector.connect(rank, channel);
    sender.greet();
    if (!sender.is_hung_up()) {
      left_.reset();
      return false;
    }
  } catch (const ConnectionLost&) {
    // It can't be reached.
  } catch (const std::runtime_error&) {
    return false;  // this rank has no descriptors left, and can't tell
  }
  const auto now = Clock::now();
  if (!left_) left_ = now;
  return now - *left_ > kLatest;
}

}  // namespace cpulaunch
