// TCP connections between the ranks of a group.
//
// Whoever sends to another rank opens a connection for that direction, when it first has something to send.  A hello
// comes first on each, with a proof that its sender has the group's key.  The proof is for one connection: it says from
// whom to whom, and for what, it is, and the key is made of what each rank has made up for this group.  So whoever has
// seen it can't use it again, and what a rank has to say needn't wait for an answer.

#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "proof.hpp"

namespace cpulaunch {

// What a connection is for: the messages of one don't wait for those of the other.
enum class Channel : int32_t { collectives, point_to_point, last };

struct ConnectionLost : std::runtime_error {
  explicit ConnectionLost(const std::string& what, int code = 0) : std::runtime_error(what), code(code) {}
  const int code;  // the system's error; 0 where that isn't known
};

constexpr size_t kLeastKey = 16;  // bytes

struct Hello {
  // What `rank` says to `to`, in a group with this key.
  static Hello of(const std::string& key, int rank, int to, Channel channel);

  uint64_t magic = 0;
  int32_t rank = -1;
  Channel channel = Channel::last;
  Proof proof{};
};

// Bytes of an operation, or that a message still lacks, from which on its reader is patient: for less, the rest costs
// more than it saves.
constexpr size_t kLeastForPatience = 8 << 20;

// Whether the other end of a connection has closed it, or refuses it.
bool is_hung_up(int descriptor);
// Lets a connection go on within a second after an outage of the network: by itself, the kernel waits up to as long
// again as the outage was, and gives up after a quarter of an hour.  The watchdog decides when a host is lost.
// Kernels before 6.15 can't do it, and keep their way.
void set_patience(int descriptor);

// The receiving end.  Nothing blocks; both functions throw ConnectionLost where nothing more can come or go.
class Receiver {
 public:
  explicit Receiver(int descriptor = -1) : descriptor_(descriptor) {}
  Receiver(Receiver&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Receiver& operator=(Receiver&& other) noexcept;
  ~Receiver();

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  // Returns how many bytes have been read; 0: none have come.  A `patient` reader, once it has read all that was there,
  // lets more of it come for a moment, and gets 0 meanwhile.  The kernel acknowledges what is read, and the sender's
  // processor spends time on each acknowledgement.
  // What comes behind that goes to `more`.
  size_t read(char* data, size_t bytes, bool patient = false, iovec more = {});

 private:
  int descriptor_;
  std::chrono::steady_clock::time_point rests_until_;
};

// The sending end.
class Sender {
 public:
  Sender() = default;
  // Its errors call it `name` until the other end has answered.
  Sender(int descriptor, const Hello& hello, std::string name = "the rank")
      : socket_(descriptor), descriptor_(descriptor), hello_(hello), name_(std::move(name)) {}

  bool is_open() const { return socket_.is_open(); }
  // Returns how many bytes of the parts have been written.
  size_t write(const iovec* parts, size_t count);
  // Tells the receiver whose connection this is, as what is written would.
  void greet();
  bool is_hung_up() const { return cpulaunch::is_hung_up(descriptor_); }

 private:
  static constexpr size_t kMaxParts = 17;

  Receiver socket_;  // closes it
  int descriptor_ = -1;
  Hello hello_{};
  size_t hello_done_ = 0;
  std::string name_;
};

// Used by several threads.
class Connector {
 public:
  // Where a rank can be reached.  The port is 0 for ranks that are not sent anything, such as those of this host.
  struct Address {
    std::string ip;
    int port = 0;
    std::string from = {};  // this host's address for connections to it; empty: the kernel chooses
  };
  struct Listener {
    int descriptor;
    int port;
  };
  // Listens on this host's address `ip`.  Throws std::runtime_error where it has no such address, or no port is free.
  static Listener listen(const std::string& ip);
  // From now on, this process listens on the first free port from `first` to `last`; on any for 0.
  static void listen_within(int first, int last);
  // A descriptor of a connection that is being made.  Throws std::runtime_error where it is known at once that there
  // will be none.
  static int reach(const Address& to);
  // Where the ranks of a host have several addresses, as of several interfaces, this rank connects to another host's
  // second address from its own host's second one.  From the first one, data would leave by one interface and its
  // acknowledgements arrive by another, which kernels refuse that filter by the way back (rp_filter).
  static void choose_sources(std::vector<Address>& addresses, const std::vector<int>& host_of, int rank);

  // Takes the listener over.  `addresses` has one for each rank of the group.  `key` is a secret of this group alone,
  // of kLeastKey bytes or more, by which its ranks know each other.
  Connector(int rank, Listener listener, std::vector<Address> addresses, std::string key);
  ~Connector() { close(); }
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // Throws ConnectionLost where the rank can't be reached.
  Sender connect(int to, Channel channel);
  // The connection that another rank has opened; not open while there is none.  Throws ConnectionLost where this rank
  // may not open more of them.  Who has just asked for another one's needn't have the kernel asked again (`looks`).
  Receiver accept(int from, Channel channel, bool looks = true);
  void close();

 private:
  struct Unknown {  // a connection whose hello has not fully come
    Receiver receiver;
    bool is_near;  // it comes from an address of the group's
    Clock::time_point since = Clock::now();
    size_t done = 0;
    Hello hello{};
  };

  void accept_all();
  bool make_room();
  bool read_hello(Unknown& unknown);
  bool is_of_group(const sockaddr_storage& address) const;

  const int rank_;
  const std::vector<Address> addresses_;
  const std::string key_;
  std::mutex mutex_;
  Listener listener_;
  std::vector<Unknown> unknown_;
  std::map<std::pair<int, Channel>, Receiver> known_;  // those that nobody has asked for yet
  std::set<std::pair<int, Channel>> greeted_;          // and those that have come: there is one of each
};

// A rank from which something is expected, and which has not opened its connection.
class Silent {
 public:
  // Whether it has ended, or left the group, without having sent anything.  `sender` is the connection to it, which is
  // opened where it isn't: that ends with the rank.
  bool has_left(Connector& connector, int rank, Channel channel, Sender& sender);

 private:
  std::optional<Clock::time_point> left_;  // when that was seen
};

}  // namespace cpulaunch
