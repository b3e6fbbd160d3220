#include "lending.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include "lender.hpp"

namespace cpulaunch {

namespace {

constexpr size_t kBytes = 8 << 20;  // more than a pipe refers to, and than a connection has room for
constexpr int kLimit = 30'000;      // milliseconds

void expect(bool right, const std::string& what) {
  if (!right) throw std::runtime_error(what);
}

// Both ends of a TCP connection.  The sending one doesn't block.
struct Connection {
  int from = -1, to = -1;

  Connection() {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    socklen_t length = sizeof(address);
    from = socket(AF_INET, SOCK_STREAM, 0);
    const bool made = bind(listener, any, length) == 0 && listen(listener, 1) == 0 &&
                      getsockname(listener, any, &length) == 0 && connect(from, any, length) == 0;
    to = accept(listener, nullptr, nullptr);
    ::close(listener);
    expect(made && to >= 0 && fcntl(from, F_SETFL, O_NONBLOCK) == 0, "no connection");
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() {
    close(from);
    if (to >= 0) close(to);
  }

  void expect_next(const char* data, size_t bytes) const {
    std::vector<char> come(bytes);
    expect(recv(to, come.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes), "not all that was taken comes");
    expect(std::equal(come.begin(), come.end(), data), "something else comes");
  }
};

std::vector<char> numbered() {
  std::vector<char> data(kBytes);
  for (size_t i = 0; i < kBytes; ++i) data[i] = static_cast<char>(i / 1000);
  return data;
}

void what_comes_is_the_memory_itself() {
  const Connection connection;
  std::vector<char> data(64 << 10, 1);
  Lender lender;
  const auto taken = lender.send(connection.from, data.data(), data.size());
  expect(taken > 0, "nothing is taken");
  data.assign(data.size(), 2);
  connection.expect_next(data.data(), taken);
}

// Sends all of it, and calls `after` each time with what was sent by then, and whether the connection is full.
void send_all(Lender& lender, const Connection& connection, const std::vector<char>& data,
              const std::function<void(size_t, bool)>& after) {
  for (size_t sent = 0; sent < data.size();) {
    const auto taken = lender.send(connection.from, data.data() + sent, data.size() - sent);
    const bool full = taken < 0 && errno == EAGAIN;
    expect(taken > 0 || full, "it is not taken");
    sent += std::max<ptrdiff_t>(taken, 0);
    after(sent, full);
    pollfd room{connection.from, POLLOUT, 0};
    expect(!full || poll(&room, 1, kLimit) > 0, "the connection stays full");
  }
}

void a_full_connection_goes_on() {
  const Connection connection;
  const auto data = numbered();
  Lender lender;
  std::future<void> reader;
  send_all(lender, connection, data, [&](size_t, bool full) {
    if (!full || reader.valid()) return;
    reader = std::async(std::launch::async, [&] { connection.expect_next(data.data(), data.size()); });
  });
  expect(reader.valid(), "the connection was never full");
  reader.get();
}

// They get the same memory, of which one wants less than what the pipe has for the other one.
void connections_take_turns() {
  const Connection first, second;
  const auto data = numbered();
  Lender lender;
  auto reader = std::async(std::launch::async, [&] { first.expect_next(data.data(), data.size()); });
  send_all(lender, first, data, [&](size_t sent, bool) {
    const size_t few = std::min<size_t>(100, data.size() - sent);
    if (few == 0) return;
    const auto taken = lender.send(second.from, data.data() + sent, few);
    expect(taken == static_cast<ptrdiff_t>(few), "not what was given is taken");
    second.expect_next(data.data() + sent, few);
  });
  reader.get();
}

void a_closed_connection_raises_no_signal() {
  signal(SIGPIPE, SIG_DFL);
  Connection connection;
  const std::vector<char> data(kBytes);
  Lender lender;
  close(connection.to);
  connection.to = -1;
  ptrdiff_t taken = 0;
  for (int i = 0; i < 100 && taken >= 0; ++i) taken = lender.send(connection.from, data.data(), kBytes);
  expect(taken < 0 && (errno == EPIPE || errno == ECONNRESET), "the end is not told");
  taken = lender.send(connection.from, data.data(), kBytes);
  expect(taken < 0 && errno == EPIPE, "the end is told once only");
}

void memory_that_cannot_be_lent_is_told() {
  const Connection connection;
  void* const none = mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  Lender lender;
  expect(lender.is_usable(), "there is no pipe");
  expect(lender.send(connection.from, static_cast<char*>(none), kBytes) == 0, "it is taken");
  expect(!lender.is_usable(), "it would be tried again");
  munmap(none, kBytes);
}

}  // namespace

void check_lending() {
  what_comes_is_the_memory_itself();
  a_full_connection_goes_on();
  connections_take_turns();
  a_closed_connection_raises_no_signal();
  memory_that_cannot_be_lent_is_told();
}

}  // namespace cpulaunch
