// The network over libfabric, for fast network cards.
//
// A message is a header, with the data behind it if that is small.  Large data follows on its own, in parts: once the
// header has found what expects it, the parts go to that memory.  Headers and parts are numbered, each from a rank to
// another, and a tag is the sender's rank with such a number.  So in which order they arrive doesn't matter: each is
// received from one rank, with one tag.
//
// libfabric moves data only while it is called, on both ends: also to connect two ranks.  So the ranks that will send
// to each other greet each other first; a rank with a small message for one that is busy needn't wait then.  And a rank
// that leaves waits until the others have what it has sent.
//
// What libfabric doesn't tell, whether a silent rank is still there, is seen by a TCP connection to it.

#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fabric_endpoint.hpp"
#include "fifo.hpp"
#include "link.hpp"
#include "network_messages.hpp"

namespace cpulaunch {

class FabricNetwork final : public MessageNetwork {
 public:
  // The endpoint knows all ranks.
  FabricNetwork(const Layout& layout, std::shared_ptr<Connector> connector, std::unique_ptr<FabricEndpoint> endpoint);
  ~FabricNetwork() override;

  void send(int to, const Tag& tag, const Signature& signature, const char* data, size_t bytes, int& pending,
            bool more_follow = false) override;
  size_t progress() override;
  const Cause& lost() override;
  void meet() override;
  bool leave() override;
  void close() override;

 private:
  static constexpr size_t kSmall = 4096;  // bytes of data that goes with its header
  static constexpr size_t kRoom = sizeof(Header) + kSmall;
  static constexpr size_t kSlots = 4;     // for the next headers from a rank
  // Phases in the tags of messages that are not of an operation.
  static constexpr uint16_t kHello = 0xfffe, kBye = 0xfffd;

  // What libfabric has been asked to do, or will be.
  struct Work {
    enum class Kind { send, receive_header, receive_data };

    char of_libfabric[libfabric::kContextSize];  // first
    Kind kind{};
    int peer = -1;
    uint64_t tag = 0;
    char* data = nullptr;
    size_t bytes = 0;
    int* pending = nullptr;                // of a message that is sent
    Tag message{};                         // whose part is received
    std::unique_ptr<char[]> memory;        // for a header
    bool done = false;                     // of a slot: a header has come
  };
  struct Peer {
    Fifo<Work*> queue;                     // to send
    size_t under_way = 0;                  // that libfabric sends
    bool listed = false;                   // in sending_
    bool sends() const { return listed || under_way > 0; }
    uint64_t headers_sent = 0, parts_sent = 0, headers_taken = 0, parts_expected = 0;
    std::array<Work*, kSlots> slots{};     // null: nothing is received from it yet
    size_t arriving = 0;                   // parts
    bool is_remote = false;                // on another host: others aren't sent anything
    bool greeted = false;                  // it has sent something
    bool left = false;                     // it has said so
    bool said_bye = false;                 // this rank has
    bool holds_slot = false;               // the header that has been taken is in the next slot
    std::string broken;                    // what libfabric says has become of the connection
  };

  bool take_header(int from) override;
  bool look(int from) override;
  std::string why_lost(int from) override;
  void send_question(int to, const Sent& question) override;
  std::vector<int> sending() const override;

  Work* new_work(Work::Kind kind, int peer, bool with_memory = false);
  void free(Work* work);
  void listen(int from);
  void enqueue(int to, const Sent& message);
  void tell(int to, uint16_t phase);
  size_t post_sends(int to);
  size_t post_all();
  void receive_next(Work* slot, uint64_t header);
  void post_receive(Work* work);
  size_t complete();
  size_t complete(Work* work, size_t bytes);
  void fail(Work* work, const std::string& what);
  size_t receive_expected(int from);
  void receive_parts(int from, Expected& message);
  void release_slot(int from);
  bool has_left(int peer);
  void close_endpoint();
  bool is_connected(const Peer& peer) const { return peer.greeted || peer.headers_sent > 0; }
  bool all_have_met();
  // Whether to look again for ranks that have gone.
  bool looks();

  const int rank_;
  std::vector<int> to_greet_;
  std::unique_ptr<FabricEndpoint> endpoint_;  // null: closed
  bool leaves_ = false;
  bool has_parted_ = false;                   // from all ranks, each of which has said bye
  Clock::time_point looked_{};
  std::vector<Peer> peers_;                   // of each rank
  std::vector<Link> links_;                   // by which is seen whether each rank is there
  std::vector<int> sending_;                  // ranks with messages to send
  Fifo<Work*> unposted_;                      // that receive
  std::deque<Work> works_;
  std::vector<Work*> free_, free_with_memory_;
  int greetings_ = 0;  // under way, and byes
};

}  // namespace cpulaunch
