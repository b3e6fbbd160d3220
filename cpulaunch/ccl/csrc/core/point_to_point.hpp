// Messages from one rank to another, for send and recv.  They are independent of other ranks, and may be received in
// any order of their tags.
//
// Between ranks of a host, messages go through a ring in shared memory; between hosts, over separate connections.  Both
// are streams of frames.  A small message is sent at once, and the receiver keeps it until it is asked for.  A large
// message is announced, and sent when the receiver has a buffer for it.  So it is copied right to that buffer, and
// messages that the receiver has not asked for take little memory.  If the kernel allows it, the receiver reads a large
// message within a host directly from the sender's memory.
//
//     small    sender ── eager(tag, bytes), data ──► receiver
//     large    sender ── request(tag, bytes, id) ──► receiver
//              sender ◄── clear(id) ──────────────── receiver
//              sender ── data(id, bytes), data ────► receiver
//     read     sender ── request(…, address) ──────► receiver, which reads the memory there
//              sender ◄── taken(id) ──────────────── receiver

#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fifo.hpp"
#include "layout.hpp"
#include "link.hpp"
#include "pool.hpp"
#include "shared_slots.hpp"
#include "team.hpp"
#include "transfer.hpp"

namespace cpulaunch {

class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  static constexpr int kAnySource = -1;

  // `slots` and `connector` may be null, as in Hierarchy.
  PointToPoint(Layout layout, std::shared_ptr<SharedSlots> slots, std::shared_ptr<Connector> connector);
  ~PointToPoint();

  // The transfer is done when the caller may reuse `data`.
  std::unique_ptr<Transfer> send(int to, int tag, const char* data, size_t bytes);
  // The transfer is done when the message is in `data`.  Then `source`, if not null, is the rank that sent it.
  std::unique_ptr<Transfer> receive(int from, int tag, char* data, size_t bytes, int32_t* source = nullptr);
  // Returns whether the others have received what was sent to them; call it until they have.
  bool leave();

 private:
  class Pipe;
  class RingPipe;
  class SocketPipe;
  class Progress;  // the transfer of one message

  struct Frame {
    enum class Kind : uint32_t { eager, request, clear, data, taken };

    Kind kind;
    int32_t tag;
    uint64_t bytes;        // of the message
    uint64_t id;           // the sender's number for a large message
    uint64_t address = 0;  // where the receiver may read the message; else 0
  };
  struct Request {
    int peer;  // a rank or kAnySource
    int tag;
    char* data;
    size_t bytes;
    bool sends;
    int32_t* source = nullptr;
    bool begun = false;  // matched with the other rank's request
    bool done = false;
    std::unique_ptr<const Mismatch> mismatch{};
  };
  using RequestPtr = std::shared_ptr<Request>;
  // Large messages by their ids.
  using Requests = std::map<uint64_t, RequestPtr, std::less<>, Pooled<std::pair<const uint64_t, RequestPtr>>>;
  struct Queued {
    Frame frame;
    RequestPtr request;  // the request that is done once this is written, or null

    // The bytes of data that follow the frame.
    size_t data() const { return request && frame.kind != Frame::Kind::taken ? request->bytes : 0; }
  };
  struct Reading {  // a message that is read from the sender's memory
    RequestPtr request;
    Frame frame;
    size_t done = 0;
  };
  struct Unexpected {  // a message that this rank has not asked for yet
    Frame frame;
    PooledVector<char> data;
    bool complete;  // all data has been received
  };
  struct Peer {
    Peer();
    Peer(Peer&&) noexcept;
    ~Peer();

    std::unique_ptr<Pipe> pipe;
    Cause lost;  // why the pipe is lost; empty while all is well
    // To the peer.
    Fifo<Queued> queue;
    size_t written = 0;  // bytes written of the first frame and its data
    Requests announced;
    uint64_t next_id = 0;
    // From the peer.
    Frame frame{};
    size_t read = 0;              // bytes read of the frame and its data
    RequestPtr receiving;         // the request that gets the frame's data
    bool keeping = false;         // the data goes to the last item of `unexpected`
    std::vector<char> discarded;  // where the data goes if it does not fit the request
    Fifo<Unexpected> unexpected;
    size_t kept = 0;              // bytes in `unexpected`
    Requests cleared;
    Fifo<Reading> reading;
  };

  void lose(int rank, const ConnectionLost& error);
  Cause lost(const Request& request);
  std::string instead_of(const Request& request) const;
  void enqueue(int to, const Frame& frame, RequestPtr request);
  bool match_unexpected(int from, const RequestPtr& request);
  void deliver(int from, const RequestPtr& request, Unexpected* message);
  void answer(int from, const RequestPtr& request, const Frame& frame);
  bool is_readable(int from) const;
  bool expects_from(int peer) const;

  bool test(Request& request);
  size_t progress();
  size_t write_to(int to);
  size_t read_from(int from);
  size_t read_memory(int from);
  void begin_frame(int from);
  void end_frame(int from);
  RequestPtr match_posted(int from, int tag);
  char* data_of(Peer& peer);

  const Layout layout_;
  const std::shared_ptr<SharedSlots> slots_;
  const std::shared_ptr<Connector> connector_;
  std::atomic<uint64_t> steps_{0};  // relaxed: it orders nothing
  std::mutex mutex_;
  std::vector<Peer> peers_;
  Fifo<RequestPtr> posted_;  // receives that no message has matched yet
  Batch batch_;
  Delivery delivery_;
  bool aborted_ = false;
};

}  // namespace cpulaunch
