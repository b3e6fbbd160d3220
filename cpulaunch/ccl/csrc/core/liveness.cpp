#include "liveness.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "connector.hpp"
#include "interface.h"

namespace cpulaunch {

namespace {

// Returns the address and port to which a socket is connected; "" if it is not connected to this port.
std::string peer_at(int descriptor, uint16_t port) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  if (getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return "";
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&peer);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&peer);
  const bool matches = (peer.ss_family == AF_INET && v4->sin_port == htons(port)) ||
                       (peer.ss_family == AF_INET6 && v6->sin6_port == htons(port));
  return matches ? std::string(reinterpret_cast<const char*>(&peer), size) : "";
}

// Whether this is the port of the socket's own end, as for a server's socket.
bool is_served_at(int descriptor, uint16_t port) {
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  if (getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &size) != 0) return false;
  return (own.ss_family == AF_INET && reinterpret_cast<sockaddr_in*>(&own)->sin_port == htons(port)) ||
         (own.ss_family == AF_INET6 && reinterpret_cast<sockaddr_in6*>(&own)->sin6_port == htons(port));
}

// Makes the kernel send keepalive probes on a connection once a second, or stops that.  The kernel closes the
// connection after two minutes without an answer.
void set_asking(int descriptor, bool asks) {
  constexpr int kSeconds = 1, kMostQuestions = 127;
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &kSeconds, sizeof(kSeconds));
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, &kSeconds, sizeof(kSeconds));
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPCNT, &kMostQuestions, sizeof(kMostQuestions));
  const int on = asks;
  setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

// Returns the time since the other end's kernel last acknowledged anything; max() if there is no connection (yet).
std::chrono::milliseconds silence_of(int descriptor) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  const bool known = descriptor >= 0 && getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
  if (!known || info.tcpi_state != TCP_ESTABLISHED) return std::chrono::milliseconds::max();
  return std::chrono::milliseconds(info.tcpi_last_ack_recv);
}

// Whether this error of a connection means that the kernel of the peer's host refused or reset it.
bool is_end(int error) { return error == ECONNREFUSED || error == ECONNRESET; }

// Returns a duplicate of the descriptor of this process's connection to `port` of a server.  Returns -1 if there is
// none, or if there are connections to that port of several servers.  Ignores connections that were closed at the other
// end: an earlier server may have used the same port.
int connection_to(uint16_t port) {
  int found = -1;
  std::string server;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int copy = fcntl(std::stoi(entry.path().filename()), F_DUPFD_CLOEXEC, 0);
    if (copy < 0) continue;
    const auto peer = peer_at(copy, port);
    if (peer.empty() || peer == server || is_hung_up(copy)) {
      close(copy);
      continue;
    }
    if (!server.empty()) {
      close(copy);
      close(found);
      return -1;
    }
    server = peer;
    found = copy;
  }
  return found;
}

}  // namespace

std::shared_ptr<Process> Process::of(int pid) {
  static auto* known = new std::map<int, std::weak_ptr<Process>>;
  auto& entry = (*known)[pid];
  auto process = entry.lock();
  if (!process || process->has_ended()) {  // another process may have the number now
    process = std::make_shared<Process>(pid);
    entry = process;
  }
  return process;
}

Process::Process(int pid) : descriptor_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))), error_(errno) {}

Process::~Process() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool Process::has_ended() const {
  if (descriptor_ < 0) return error_ == ESRCH;
  pollfd entry{descriptor_, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

std::shared_ptr<StoreServer> StoreServer::at(const std::string& host, uint16_t port) {
  static auto* known = new std::map<std::pair<std::string, uint16_t>, std::weak_ptr<StoreServer>>;
  auto& entry = (*known)[{host, port}];
  auto server = entry.lock();
  if (!server || server->is_gone()) {
    server = std::make_shared<StoreServer>(connection_to(port), port);
    entry = server;
  }
  server->make_patient();
  return server;
}

void StoreServer::make_patient() const {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int copy = port_ ? fcntl(std::stoi(entry.path().filename()), F_DUPFD_CLOEXEC, 0) : -1;
    if (copy < 0) continue;
    // This includes the listening socket, whose settings are inherited by connections that are accepted later.
    if (!peer_at(copy, port_).empty() || is_served_at(copy, port_)) set_patience(copy);
    close(copy);
  }
}

StoreServer::~StoreServer() {
  if (connection_ >= 0) close(connection_);
}

bool StoreServer::is_gone() const { return connection_ >= 0 && is_hung_up(connection_); }

Clock::duration StoreServer::end_query() {
  const auto took = Clock::now() - query_began_.exchange(Clock::time_point::max());
  if (is_asked_.exchange(false)) set_asking(connection_, false);
  return took;
}

bool StoreServer::is_silent_for(std::chrono::milliseconds limit) {
  const auto now = Clock::now();
  const auto began = query_began_.load();
  if (began > now || now - began < limit / CL_SILENT_PARTS) return false;
  if (connection_ >= 0 && !is_asked_.exchange(true)) set_asking(connection_, true);
  return now - began > limit && silence_of(connection_) > limit;
}

Beacon::Beacon(const std::string& ip) {
  const auto listener = Connector::listen(ip);
  descriptor_ = listener.descriptor;
  address_ = ip + " " + std::to_string(listener.port);
}

Beacon::~Beacon() { close(descriptor_); }

void Beacon::close_connections() const {
  for (int other; (other = accept4(descriptor_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) close(other);
}

RemoteProcess::RemoteProcess(const std::string& address) {
  std::istringstream text(address);
  Connector::Address to;
  text >> to.ip >> to.port;
  try {
    connection_ = Connector::reach(to);
    set_patience(connection_);
    set_asking(connection_, true);
  } catch (const ConnectionLost& error) {
    ended_ = is_end(error.code);
  } catch (const std::runtime_error&) {
    // The process can't be reached, so is_there() returns false.
  }
}

RemoteProcess::~RemoteProcess() {
  if (connection_ >= 0) close(connection_);
}

bool RemoteProcess::has_ended() {
  int error = 0;
  socklen_t size = sizeof(error);
  // Keep the result, because the kernel reports an error only once.
  if (connection_ >= 0 && getsockopt(connection_, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && is_end(error)) {
    ended_ = true;
  }
  return ended_;
}

bool RemoteProcess::is_there(std::chrono::milliseconds within) const { return silence_of(connection_) <= within; }

}  // namespace cpulaunch
