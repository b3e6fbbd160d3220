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
#include <map>
#include <utility>

namespace cpulaunch {

namespace {

constexpr int kBacklog = 1024;                   // connections that have not been accepted
// At most this many unsent bytes of a connection wait in the kernel: so few that they may still be in the processor's
// cache when they are sent.  Data in transit doesn't count.
constexpr int kMaxUnsent = 256 << 10;
constexpr size_t kMaxStrangers = 64;             // connections without a hello, beside those of all ranks
constexpr std::chrono::seconds kHelloTime{3};    // for a connection from the address of a rank

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

void prepare(int descriptor) {
  const int on = 1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(descriptor, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kMaxUnsent, sizeof(kMaxUnsent));
  set_patience(descriptor);
}

// In errors.
std::string name_of(const Connector::Address& address) {
  return address.from.empty() ? address.ip : address.ip + ", from " + address.from + ",";
}

}  // namespace

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
  if (reached && (::connect(descriptor, address.get(), address.length) == 0 || errno == EINPROGRESS)) return descriptor;
  const int error = errno;
  ::close(descriptor);
  throw ConnectionLost(name_of(to) + " can't be reached: " + std::strerror(error), error);
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

Connection Connector::connect(int to, Channel channel) {
  const int descriptor = reach(addresses_[to]);
  Connection connection(descriptor, Hello::of(key_, rank_, to, channel, /*has_opened=*/true),
                        Hello::of(key_, to, rank_, channel, /*has_opened=*/false), name_of(addresses_[to]));
  prepare(descriptor);
  return connection;
}

Connection Connector::take(int from, Channel channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = known_.find({from, channel});
  if (found == known_.end()) return {};
  Connection connection(std::move(found->second), Hello::of(key_, rank_, from, channel, /*has_opened=*/false));
  known_.erase(found);
  return connection;
}

void Connector::look() {
  std::lock_guard<std::mutex> lock(mutex_);
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
    prepare(descriptor);
    unknown_.push_back({Socket(descriptor), is_of_group(from)});
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
    unknown.done += unknown.socket.read(reinterpret_cast<char*>(&hello) + unknown.done, sizeof(hello) - unknown.done);
  } catch (const ConnectionLost&) {
    return true;
  }
  if (unknown.done < sizeof(hello)) return false;
  const bool ours = hello.rank >= 0 && hello.rank < static_cast<int>(addresses_.size()) &&
                    hello == Hello::of(key_, hello.rank, rank_, hello.channel, /*has_opened=*/true);
  const std::pair which(hello.rank, hello.channel);
  if (ours && greeted_.insert(which).second) known_.emplace(which, std::move(unknown.socket));
  return true;
}

}  // namespace cpulaunch
