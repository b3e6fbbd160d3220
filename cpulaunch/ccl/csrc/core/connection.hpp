// A TCP connection between two ranks of a group, which carries data in both directions.
//
// Each direction begins with a hello, in which the rank proves that it has the group's key.  The proof holds for one
// direction of one connection: it covers the two ranks, the channel and who has opened the connection, and each group
// has a key of its own.  So a stranger who has seen the proof can't use it again, and neither rank needs to wait for
// the other's hello before it sends data.

#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "proof.hpp"

namespace cpulaunch {

// Tells the connections between two ranks apart.  Messages on one channel don't wait for those on another.  Collectives
// have this channel, and further ones if their large messages travel in stripes (network_striped.hpp).
enum class Channel : int32_t { point_to_point, collectives };
constexpr Channel channel_of_stripe(size_t stripe) {
  return static_cast<Channel>(static_cast<size_t>(Channel::collectives) + stripe);
}

struct ConnectionLost : std::runtime_error {
  explicit ConnectionLost(const std::string& what, int code = 0) : std::runtime_error(what), code(code) {}
  const int code;  // the system's error; 0 where that isn't known
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

struct Hello {
  // What `rank` says to `to`, in a group with this key.
  static Hello of(const std::string& key, int rank, int to, Channel channel, bool has_opened);

  bool operator==(const Hello& other) const {
    return magic == other.magic && rank == other.rank && channel == other.channel && are_same(proof, other.proof);
  }

  uint64_t magic = 0;
  int32_t rank = -1;
  Channel channel = Channel::point_to_point;
  Proof proof{};
};

// One end of a connection.  No function blocks.
class Socket {
 public:
  // Takes the descriptor over.
  explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  // Returns how many bytes have been read; 0 if none have arrived.  Bytes beyond `bytes` go to `more`.  A `patient`
  // reader that has read all available bytes gets 0 for a moment, while more of them arrive: the kernel acknowledges
  // each read, and each acknowledgement costs the sender's processor time.  Throws ConnectionLost if nothing more can
  // arrive.
  size_t read(char* data, size_t bytes, bool patient = false, iovec more = {});
  // Returns how many bytes of the parts, of which there are up to kMaxParts, have been written.  Throws ConnectionLost
  // if none can be written any more.
  static constexpr size_t kMaxParts = 17;
  size_t write(const iovec* parts, size_t count);
  // Whether the other end has closed the connection, and all that it has sent has been read.
  bool has_ended() const;
  // The bytes that have been written, and that the other host may not have received; 0 if it never will.  For a rank
  // that leaves: if it closes the connection before that host has received them, the kernel goes on delivering them.
  size_t unacknowledged() const;

 private:
  int descriptor_;
  std::chrono::steady_clock::time_point rests_until_;
};

// Says this rank's hello before its data, and checks the other rank's hello.
class Connection {
 public:
  Connection() = default;
  // A connection that this rank has opened.  Errors call the other rank `name` until it has been reached.
  Connection(int descriptor, const Hello& own, const Hello& others, std::string name);
  // A connection that the other rank has opened.  Its hello has been read.
  Connection(Socket socket, const Hello& own);

  bool is_open() const { return socket_.is_open(); }
  const Socket& socket() const { return socket_; }
  // Whether the other rank's hello has been read.
  bool has_heard() const { return is_open() && (!hellos_ || hellos_->heard == sizeof(Hello)); }
  // Reads what has come of the other rank's hello.  Throws ConnectionLost also if a stranger has accepted the
  // connection.
  void hear();
  // The same as in Socket.  Nothing is read before has_heard().
  size_t read(char* data, size_t bytes, bool patient = false, iovec more = {});
  size_t write(const iovec* parts, size_t count);
  // Says the hello, which otherwise goes with the first data.
  void greet();

 private:
  struct Hellos {
    Hello own, others, come{};
    size_t said = 0, heard = 0;  // bytes of `own` and `come`
    std::string name;
  };

  void forget_hellos();
  [[noreturn]] void fail(const ConnectionLost& error) const;

  Socket socket_;
  std::unique_ptr<Hellos> hellos_;  // null once they have been said and heard
};

}  // namespace cpulaunch
