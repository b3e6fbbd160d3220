// TCP connections between the ranks of a group.
//
// A rank that has something to send to another one opens a connection, which carries data in this direction only.  If
// it carried both, a process that ends before it has read everything would lose what it has sent, because the kernel
// resets such a connection.
//
// A connection begins with a hello, in which the sender proves that it has the group's key.  The proof holds for one
// connection: it covers the two ranks and the channel, and each group has a key of its own.  So a stranger who has seen
// the proof can't use it again, and the sender needn't wait for an answer before it sends data.

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

// Tells the connections from one rank to another apart.  Messages on one channel don't wait for those on another.
// Collectives have this channel, and further ones if their large messages travel in stripes (network_striped.hpp).
enum class Channel : int32_t { point_to_point, collectives };
constexpr Channel channel_of_stripe(size_t stripe) {
  return static_cast<Channel>(static_cast<size_t>(Channel::collectives) + stripe);
}

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
  Channel channel = Channel::point_to_point;
  Proof proof{};
};

// A reader is patient in operations and messages of at least this many bytes.  In smaller ones, its pauses would cost
// more than they save.
constexpr size_t kLeastForPatience = 8 << 20;

// Returns whether the other end of a connection has closed or refused it.
bool is_hung_up(int descriptor);
// Lets a connection continue within a second after an outage of the network.  Otherwise, the kernel may wait as long
// again as the outage took, and gives up after a quarter of an hour.  The watchdog decides when a host is lost.  Has no
// effect on kernels before 6.15.
void set_patience(int descriptor);

// The receiving end.  No function of the two ends blocks.  They throw ConnectionLost if no more data can pass.
class Receiver {
 public:
  explicit Receiver(int descriptor = -1) : descriptor_(descriptor) {}
  Receiver(Receiver&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Receiver& operator=(Receiver&& other) noexcept;
  ~Receiver();

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  // Returns how many bytes have been read; 0 if none have arrived.  Bytes beyond `bytes` go to `more`.  A `patient`
  // reader that has read all available bytes gets 0 for a moment, while more of them arrive: the kernel acknowledges
  // each read, and each acknowledgement costs the sender's processor time.
  size_t read(char* data, size_t bytes, bool patient = false, iovec more = {});

 private:
  int descriptor_;
  std::chrono::steady_clock::time_point rests_until_;
};

// The sending end.
class Sender {
 public:
  Sender() = default;
  // Errors call the receiver `name` until it has answered.
  Sender(int descriptor, const Hello& hello, std::string name = "the rank")
      : socket_(descriptor), descriptor_(descriptor), hello_(hello), name_(std::move(name)) {}

  bool is_open() const { return socket_.is_open(); }
  // Returns how many bytes of the parts have been written.
  size_t write(const iovec* parts, size_t count);
  // Sends the hello, which otherwise goes with the first data.
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
  // The port is 0 for ranks to which nothing is sent, such as those of this host.
  struct Address {
    std::string ip;
    int port = 0;
    std::string from = {};  // this host's address for connections to it; empty: the kernel chooses
  };
  struct Listener {
    int descriptor;
    int port;
  };
  // Listens on this host's address `ip`.  Throws std::runtime_error if the host has no such address, or no free port.
  static Listener listen(const std::string& ip);
  // From now on, this process listens on the first free port from `first` to `last`, or on any port if these are 0.
  static void listen_within(int first, int last);
  // Returns the descriptor of a connection that is being made.  Throws std::runtime_error if that fails at once.
  static int reach(const Address& to);
  // If the ranks of a host have several addresses (several interfaces), this rank connects to another host's second
  // address from its own host's second address, and so on.  From the first address, data would leave by one interface
  // while acknowledgements arrive by another, and many kernels drop such packets (rp_filter).
  static void choose_sources(std::vector<Address>& addresses, const std::vector<int>& host_of, int rank);

  // Takes the listener over.  `addresses` has an item for each rank of the group.  `key` is the group's secret, of at
  // least kLeastKey bytes.  Each rank opens up to `channels` connections to this one.
  Connector(int rank, Listener listener, std::vector<Address> addresses, std::string key, size_t channels = 2);
  ~Connector() { close(); }
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // Throws ConnectionLost if the rank can't be reached.
  Sender connect(int to, Channel channel);
  // Returns the connection that another rank has opened; it is not open if there is none yet.  Throws ConnectionLost if
  // this process may not have more descriptors.  If `looks` is false, new connections are not accepted first.
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
  const size_t channels_;
  std::mutex mutex_;
  Listener listener_;
  std::vector<Unknown> unknown_;
  std::map<std::pair<int, Channel>, Receiver> known_;  // connections that accept() has not returned yet
  std::set<std::pair<int, Channel>> greeted_;          // all connections so far: a second one is refused
};

// A rank from which something is expected, and which has not opened its connection.
class Silent {
 public:
  // Returns whether the rank has ended, or left the group, without having sent anything.  `sender` is this rank's
  // connection to it, which is opened if necessary, and which breaks when that rank ends.
  bool has_left(Connector& connector, int rank, Channel channel, Sender& sender);

 private:
  std::optional<Clock::time_point> left_;  // when the connection was first seen broken
};

}  // namespace cpulaunch
