// Checks of the connections between ranks.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "details.hpp"
#include "link.hpp"
#include "meeting.hpp"
#include "programs.hpp"
#include "rank.hpp"

namespace {

std::atomic<int> unreachable{0};  // so many calls of connect() fail

}  // namespace

// Replaces the C library's function.
extern "C" int connect(int descriptor, const sockaddr* address, socklen_t length) {
  if (unreachable > 0) {
    --unreachable;
    errno = ENETUNREACH;
    return -1;
  }
  return static_cast<int>(syscall(SYS_connect, descriptor, address, length));
}

namespace cpulaunch {

namespace {

using namespace std::chrono_literals;

void until(const std::function<bool()>& happens, const char* otherwise) {
  const auto last = std::chrono::steady_clock::now() + 10s;
  while (!happens()) expect(std::chrono::steady_clock::now() < last, otherwise);
}

int connect_from(const char* ip, int port) {
  const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in own{}, to{};
  own.sin_family = to.sin_family = AF_INET;
  inet_pton(AF_INET, ip, &own.sin_addr);
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  to.sin_port = htons(static_cast<uint16_t>(port));
  expect(bind(descriptor, reinterpret_cast<sockaddr*>(&own), sizeof(own)) == 0, "no address");
  expect(connect(descriptor, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0, "no connection");
  return descriptor;
}

void say(int to, const Hello& hello) {
  expect(send(to, &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello), "the connection is closed");
}

Connection look_for(Connector& connector, int rank, Channel channel) {
  connector.look();
  return connector.take(rank, channel);
}

Connection accept_from(Connector& connector, int rank, Channel channel) {
  Connection connection;
  until([&] { return (connection = look_for(connector, rank, channel)).is_open(); }, "the rank does not come through");
  return connection;
}

// What the opener of a connection says.
Hello opening(const std::string& key, int rank, int to, Channel channel) {
  return Hello::of(key, rank, to, channel, /*has_opened=*/true);
}

}  // namespace

// A slow rank still gets its connection if others come from elsewhere, or any number at once from a rank's own host.
void check_crowd(const char* from) {
  const auto listener = Connector::listen("127.0.0.1");
  const std::string key(kLeastKey, 'x');
  Connector connector(0, listener, {{"127.0.0.1", listener.port}, {"127.0.0.1", 1}}, key);
  const int rank = connect_from("127.0.0.1", listener.port);
  expect(!look_for(connector, 1, Channel::collectives).is_open(), "nobody has said hello");
  std::vector<int> strangers;
  for (int i = 0; i < 100; ++i) {  // more than the rank listens to at once
    strangers.push_back(connect_from(from, listener.port));
    connector.look();
  }
  say(rank, opening(key, 1, 0, Channel::collectives));
  accept_from(connector, 1, Channel::collectives);
  for (const int each : strangers) close(each);
  close(rank);
}

namespace {

std::string hex(const Proof& proof) {
  std::string text;
  for (const unsigned char each : proof) {
    for (const int digit : {each >> 4, each & 15}) text += "0123456789abcdef"[digit];
  }
  return text;
}

}  // namespace

// A connection counts only once, and only if its proof was made for it.
void check_proofs() {
  // Cases 1, 2 and 6 of RFC 4231.  The empty text is from Wikipedia's article on HMAC.
  expect(hex(prove(std::string(20, '\x0b'), "Hi There")) ==
             "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7", "case 1");
  expect(hex(prove("Jefe", "what do ya want for nothing?")) ==
             "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843", "case 2");
  expect(hex(prove(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
             "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54", "case 6");
  expect(hex(prove("", "")) == "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad", "nothing");

  const auto listener = Connector::listen("127.0.0.1");
  const std::string key(kLeastKey, 'x');
  Connector connector(0, listener, {{"127.0.0.1", listener.port}, {"127.0.0.1", 1}, {"127.0.0.1", 1}}, key);
  const auto right = opening(key, 1, 0, Channel::collectives);
  auto other_channel = right, other_rank = right, other_magic = right;
  other_channel.channel = Channel::point_to_point;
  other_rank.rank = 2;
  other_magic.magic ^= 1;
  std::vector<int> refused;
  const auto answer = Hello::of(key, 1, 0, Channel::collectives, /*has_opened=*/false);
  for (const auto& each : {answer, opening(std::string(kLeastKey, 'y'), 1, 0, Channel::collectives),
                           opening(key, 1, 2, Channel::collectives), other_channel, other_rank, other_magic,
                           opening(key, -1, 0, Channel::collectives), opening(key, 3, 0, Channel::collectives)}) {
    refused.push_back(connect_from("127.0.0.1", listener.port));
    say(refused.back(), each);
  }
  const int rank = connect_from("127.0.0.1", listener.port);
  say(rank, right);
  const auto accepted = accept_from(connector, 1, Channel::collectives);
  refused.push_back(connect_from("127.0.0.1", listener.port));
  say(refused.back(), right);  // as an eavesdropper could
  for (const int each : refused) {
    const auto is_closed = [&] {
      expect(!look_for(connector, 1, Channel::collectives).is_open(), "a stranger comes through");
      return is_hung_up(each);
    };
    until(is_closed, "a stranger's connection stays open");
    close(each);
  }
  expect(!look_for(connector, 1, Channel::point_to_point).is_open(), "a proof counts for the other channel");
  expect(!look_for(connector, 2, Channel::collectives).is_open(), "a proof counts for another rank");
  expect(!is_hung_up(rank), "the rank's own connection is closed");
  close(rank);
}

namespace {

// Two ranks, each with a link to the other one.
struct Pair {
  explicit Pair(bool is_shared, Connector::Address address_of_second = {})
      : listeners{Connector::listen("127.0.0.1"), Connector::listen("127.0.0.1")},
        addresses{{"127.0.0.1", listeners[0].port}, {"127.0.0.1", listeners[1].port}} {
    if (address_of_second.port) addresses[1] = std::move(address_of_second);
    for (const int rank : {0, 1}) {
      connectors[rank] = std::make_unique<Connector>(rank, listeners[rank], addresses, key);
      links[rank] = std::make_unique<Link>(*connectors[rank], 1 - rank, Channel::collectives, is_shared);
    }
  }

  // Returns how many bytes the rank can write, or read, now.
  size_t write(int rank, std::string text) {
    if (!links[rank]->is_settled()) connectors[rank]->look();
    const iovec part{text.data(), text.size()};
    return links[rank]->write(&part, 1);
  }
  size_t read(int rank, char* to, size_t bytes) {
    if (!links[rank]->is_settled()) connectors[rank]->look();
    return links[rank]->read(to, bytes);
  }
  void send(int from, const std::string& text) {
    until([&] { return write(from, text) == text.size(); }, "it can't be written");
    std::string come(text.size(), ' ');
    size_t done = 0;
    until([&] { return (done += read(1 - from, come.data() + done, come.size() - done)) == come.size(); },
          "it does not come");
    expect(come == text, "it comes garbled");
  }

  std::string key = std::string(kLeastKey, 'k');
  Connector::Listener listeners[2];
  std::vector<Connector::Address> addresses;
  std::unique_ptr<Connector> connectors[2];
  std::unique_ptr<Link> links[2];
};

}  // namespace

// Whichever rank begins, the same connection brings the answer.
void check_one_connection() {
  for (const int first : {0, 1}) {
    Pair pair(/*is_shared=*/true);
    expect(pair.write(1, "early") == 0 && !pair.links[1]->is_open(), "the higher rank doesn't wait for the lower one");
    const size_t before = open_descriptors();
    pair.send(first, "question");
    pair.send(1 - first, "answer");
    pair.send(first, "more");
    expect(open_descriptors() - before == 2, "there is not one connection with two ends");
    expect(pair.links[0]->is_settled() && pair.links[1]->is_settled(), "the ranks still look for another one");
    until([&] { return pair.links[0]->unacknowledged() == 0; }, "what has come is on its way");
  }
}

// Each rank opens the connection over which it sends, and none to receive.
void check_separate_connections() {
  Pair pair(/*is_shared=*/false);
  const size_t before = open_descriptors();
  char byte = 0;
  for (const int rank : {0, 1}) {
    expect(pair.read(rank, &byte, 1) == 0 && !pair.links[rank]->is_open(), "a rank that only reads opens a connection");
  }
  pair.send(1, "question");
  expect(!pair.links[0]->is_open(), "the rank would send over the other one's connection");
  pair.send(0, "answer");
  expect(open_descriptors() - before == 4, "there are not two connections with two ends");
  for (const auto& each : pair.links) expect(each->is_settled(), "the ranks still look for another one");
}

// The second rank doesn't see the first one's connection, because nothing has come over it, and opens another one.
void check_two_connections() {
  for (const auto& [first, is_shared] : {std::pair(0, true), {1, true}, {0, false}}) {
    Pair pair(is_shared);
    for (const auto& each : pair.links) each->open();
    for (const char* text : {"one", "another", "last"}) {
      pair.send(first, text);
      pair.send(1 - first, text);
    }
    const int left = 1 - first;
    pair.links[left].reset();
    pair.connectors[left].reset();
    until([&] { return pair.links[1 - left]->has_left(); }, "nobody notices that the other rank has left");
  }
}

// Over libfabric, ranks send nothing over their connection.  They only look whether it has ended.
void check_who_has_left() {
  for (const int opener : {0, 1}) {
    Pair pair(/*is_shared=*/true);
    pair.links[opener]->open();
    const auto is_accepted = [&] {
      for (const int each : {opener, 1 - opener}) expect(!pair.links[each]->has_left(), "a rank that stays has left");
      return pair.links[1 - opener]->is_settled();
    };
    until(is_accepted, "the rank does not come through");
    pair.links[1 - opener].reset();
    until([&] { return pair.links[opener]->has_left(); }, "nobody notices that the other rank has left");
  }
}

// Somebody else listens where a rank has listened.  It has seen how the rank opened a connection.
void check_stranger_at_address() {
  const auto stranger = Connector::listen("127.0.0.1");
  Pair pair(/*is_shared=*/true, {"127.0.0.1", stranger.port});
  pair.links[0]->open();
  pollfd waiting{stranger.descriptor, POLLIN, 0};
  expect(poll(&waiting, 1, 10'000) == 1, "nobody connects");
  const int connection = accept4(stranger.descriptor, nullptr, nullptr, SOCK_CLOEXEC);
  say(connection, opening(pair.key, 1, 0, Channel::collectives));
  char byte = 0;
  until([&] {
    expect(pair.read(0, &byte, 1) == 0, "a stranger's data is read");
    return pair.links[0]->has_left();
  }, "nobody notices that this is a stranger");
  try {
    pair.write(0, "secret");
    expect(false, "a stranger gets data");
  } catch (const ConnectionLost& error) {
    expect(std::string(error.what()) == "127.0.0.1 is not a rank of the group", error.what());
  }
  close(connection);
  close(stranger.descriptor);
}

// The rank that leaves has something to read, so the kernel drops what is still on its way to the other rank.
void check_last_data() {
  Pair pair(/*is_shared=*/true);
  pair.send(0, "hello");
  pair.send(1, "hello");
  pair.write(1, "not read");
  const std::string piece(1 << 20, 'x');
  size_t sent = 0;
  for (int blocked = 0; blocked < 100;) {
    const size_t bytes = pair.write(0, piece);
    sent += bytes;
    blocked = bytes ? 0 : blocked + 1;
  }
  std::atomic<bool> leaves{false};
  std::thread leaving([&] {
    Delivery delivery;
    leaves = true;
    while (!delivery.is_over(pair.links[0]->unacknowledged())) std::this_thread::yield();
    pair.links[0].reset();
  });
  while (!leaves) std::this_thread::yield();
  std::vector<char> come(sent);
  size_t done = 0;
  try {
    until([&] { return (done += pair.read(1, come.data(), sent - done)) == sent; }, "it does not come");
  } catch (const std::exception&) {
  }
  leaving.join();
  expect(done == sent, "some of the last data is lost");
}

// The network is gone for a moment when a rank begins to read.
void check_short_outage() {
  Pair pair(/*is_shared=*/true);
  char byte = 0;
  unreachable = 1;
  expect(pair.read(0, &byte, 1) == 0 && unreachable == 0, "the rank doesn't connect");
  pair.send(0, "question");
  pair.send(1, "answer");
}

// A rank says hello over the connection that it has opened, even if it only reads from the other one's.  A connection
// without a hello is closed if there are too many of them.
void check_reader_says_hello() {
  Pair pair(/*is_shared=*/true);
  for (const int rank : {1, 0}) pair.links[rank]->open();
  pair.send(1, "text");
  char byte = 0;
  until([&] {
    expect(pair.read(0, &byte, 1) + pair.read(1, &byte, 1) == 0, "more comes than was sent");
    return pair.links[1]->is_settled();
  }, "the reader does not say hello");
}

// A rank has opened the connection, and left some time before the other one looks.  The kernel still has data to
// deliver.
void check_late_reader() {
  struct Late {
    int sender;
    Pair pair;
    size_t sent = 0;
  };
  std::list<Late> all;
  for (const auto& [first, is_shared] : {std::pair(0, true), {1, true}, {0, false}, {1, false}}) {
    auto& [sender, pair, sent] = all.emplace_back(Late{first, Pair(is_shared)});
    pair.links[sender]->open();
    const std::string piece(1 << 20, 'x');
    for (int blocked = 0; sent == 0 || blocked < 100;) {
      const size_t bytes = pair.write(sender, piece);
      sent += bytes;
      blocked = bytes ? 0 : blocked + 1;
    }
    expect(pair.links[sender]->unacknowledged() > 0, "all data is delivered");
    pair.links[sender].reset();
    pair.connectors[sender].reset();
  }
  std::this_thread::sleep_for(3s);  // the kernel tries several times
  for (auto& [sender, pair, sent] : all) {
    std::vector<char> come(sent);
    size_t done = 0;
    const int reader = 1 - sender;
    until([&, &pair = pair, &sent = sent] { return (done += pair.read(reader, come.data(), sent - done)) == sent; },
          "it does not come");
  }
}

// Both ranks have opened a connection.  When the second one leaves, it hasn't accepted the first one's.  The kernel
// then resets it before the first rank has said hello.
void check_data_before_hello() {
  Pair pair(/*is_shared=*/true);
  for (const int rank : {1, 0}) pair.links[rank]->open();
  std::string data = "the last data";
  const iovec part{data.data(), data.size()};
  until([&] { return pair.links[1]->write(&part, 1) == data.size(); }, "it can't be written");
  until([&] { return pair.links[1]->unacknowledged() == 0; }, "what has come is on its way");
  pair.links[1].reset();
  pair.connectors[1].reset();
  std::string come(data.size(), ' ');
  size_t done = 0;
  until([&] { return (done += pair.read(0, come.data() + done, come.size() - done)) == come.size(); },
        "it does not come");
  expect(come == data, "it comes garbled");
}

// The root of a broadcast is late, so it is asked whether it calls the same.  It leaves without having read that.
void check_asked_root() {
  share_connections();
  Meeting meeting({0, 1}, 1);
  run_ranks(meeting.size(), [&](int rank) {
    auto own = std::make_unique<Rank>(meeting, rank);
    Call call{Call::Kind::broadcast, {1, NumberType::int32}, 4 << 20};
    call.root = 0;
    if (rank == 0) meeting.wait_for_all();
    const auto running = own->start(call);
    if (rank == 1) {
      running.test();
      running.check_peers();
      meeting.wait_for_all();
    }
    running.wait(10s);
    running.check();
  });
}

// Three ranks and one: the addresses from which a rank of the first host connects, and the last rank.
void check_sources() {
  const auto sources = [](int rank, const std::vector<std::string>& ips) {
    std::vector<Connector::Address> addresses;
    for (const auto& ip : ips) addresses.push_back({ip, 1});
    Connector::choose_sources(addresses, {7, 7, 7, 3}, rank);
    std::string all;
    for (const auto& each : addresses) all += each.from + " ";
    return all;
  };
  expect(sources(1, {"a", "a", "a", "b"}) == "a a a a ", "one interface is not used");
  expect(sources(1, {"a", "A", "a", "b"}) == "a A a a ", "it crosses to the other network");
  expect(sources(3, {"a", "A", "a", "b"}) == "b  b b ", "it leaves from an address that it doesn't know");
}

}  // namespace cpulaunch
