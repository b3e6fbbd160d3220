#include "intruders.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

namespace cpulaunch {

namespace {

constexpr int kSilent = 100;     // strangers for each rank: more than a rank listens to at once
constexpr int kTalkative = 20;   // those that send something wrong
constexpr int kGarbled = 200;    // one of this many bytes of a connection is changed: they are headers

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int connect_to(int port) {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto address = loopback(port);
  if (connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    throw std::runtime_error("a rank doesn't listen");
  }
  return descriptor;
}

bool send_all(int to, const char* data, size_t bytes) {
  while (bytes > 0) {
    const auto sent = send(to, data, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

// Returns when either end closes its connection.  If `change` is not 0, it changes one byte.
void forward(int from, int to, size_t at, char change) {
  char buffer[4096];
  for (size_t begin = 0;;) {
    const auto got = recv(from, buffer, sizeof(buffer), 0);
    if (got <= 0) break;
    if (begin <= at && at < begin + got) buffer[at - begin] = static_cast<char>(buffer[at - begin] ^ change);
    begin += static_cast<size_t>(got);
    if (!send_all(to, buffer, static_cast<size_t>(got))) break;
  }
  for (const int each : {from, to}) shutdown(each, SHUT_RDWR);
}

// Changes one byte in one of the directions.
void forward_both(int one, int other, size_t at, char change, bool is_there) {
  std::thread back(forward, other, one, at, is_there ? 0 : change);
  forward(one, other, at, is_there ? change : 0);
  back.join();
  for (const int each : {one, other}) close(each);
}

}  // namespace

Strangers::Strangers(const std::vector<Connector::Address>& addresses) {
  for (const auto& address : addresses) {
    if (address.port == 0) continue;
    for (int i = 0; i < kSilent + kTalkative; ++i) descriptors_.push_back(connect_to(address.port));
    for (int i = 0; i < kTalkative; ++i) {
      // The text is shorter than a hello, as long, or longer.
      std::string text = "GET / HTTP/1.1\r\nHost: example.org\r\n\r\n";
      text.resize(sizeof(Hello) + 20, ' ');
      send_all(descriptors_.end()[-1 - i], text.data(), sizeof(Hello) + (i % 3 - 1) * 20);
    }
  }
}

Strangers::~Strangers() {
  for (const int descriptor : descriptors_) close(descriptor);
}

Garbler::Garbler(std::vector<Connector::Address>& addresses, uint64_t seed) : random_(seed) {
  for (auto& address : addresses) {
    if (address.port == 0) continue;
    const auto listener = Connector::listen(address.ip);
    listeners_.push_back(listener.descriptor);
    accepting_.emplace_back(&Garbler::accept_from, this, listener.descriptor, address.port);
    address.port = listener.port;
  }
}

Garbler::~Garbler() {
  for (const int listener : listeners_) shutdown(listener, SHUT_RDWR);
  for (auto& thread : accepting_) thread.join();
  for (const int listener : listeners_) close(listener);
  for (auto& thread : forwarding_) thread.join();
}

void Garbler::accept_from(int listener, int port) {
  for (pollfd waiting{listener, POLLIN, 0}; poll(&waiting, 1, -1) > 0 && !(waiting.revents & POLLHUP);) {
    const int from = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (from < 0) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    try {
      const auto [at, change, is_there] = place();
      const int to = connect_to(port);
      forwarding_.emplace_back(forward_both, from, to, at, change, is_there);
    } catch (const std::exception&) {  // the rank has ended
      close(from);
    }
  }
}

Garbler::Place Garbler::place() {
  return {random_() % kGarbled, static_cast<char>(1 + random_() % 255), random_() % 2 == 0};
}

}  // namespace cpulaunch
