// Messages from one rank to another, as send and recv have them: whatever others do, and in any order of tags.
//
// Between ranks of a host they go through a ring in shared memory, between hosts over connections of their own.  Either
// is a stream of frames.  What is small goes at once, and the receiver keeps it until somebody asks for it.  What is
// large is announced, and goes when the receiver has asked for it: so it is copied to where it belongs, and memory that
// nobody has asked for stays small.  Where the kernel allows that, the receiver reads a large message of the own host
// from its sender's memory.
//
//     small    sender ── eager(tag, bytes), data ──► receiver
//     large    sender ── request(tag, bytes, id) ──► receiver
//              sender ◄── clear(id) ──────────────── receiver
//              sender ── data(id, bytes), data ────► receiver
//     read     sender ── request(…, address) ──────► receiver, which reads what is there
//              sender ◄── taken(id) ──────────────── receiver

#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "connector.hpp"
#include "layout.hpp"
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

  // Done when `data` may be used again.
  std::unique_ptr<Transfer> send(int to, int tag, const char* data, size_t bytes);
  // Done when the message is in `data`; `source`, if not null, is then the rank that it came from.
  std::unique_ptr<Transfer> receive(int from, int tag, char* data, size_t bytes, int32_t* source = nullptr);

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
    uint64_t id;           // which the sender gives a large message
    uint64_t address = 0;  // of a message that may be read; else 0
  };
  struct Request {
    int peer;  // or kAnySource
    int tag;
    char* data;
    size_t bytes;
    bool sends;
    int32_t* source = nullptr;
    bool begun = false;  // the two ranks know of each other's
    bool done = false;
    std::unique_ptr<const Mismatch> mismatch{};
  };
  using RequestPtr = std::shared_ptr<Request>;
  struct Queued {
    Frame frame;
    RequestPtr request;  // which is done once this has been written; null for none

    size_t data() const { return request && frame.kind != Frame::Kind::taken ? request->bytes : 0; }  // that follows
  };
  struct Reading {  // from the sender's memory
    RequestPtr request;
    Frame frame;
    size_t done = 0;
  };
  struct Unexpected {  // what nobody has asked for yet
    Frame frame;
    std::vector<char> data;
    bool complete;  // all data is here
  };
  struct Peer {
    Peer();
    Peer(Peer&&) noexcept;
    ~Peer();

    std::unique_ptr<Pipe> pipe;
    Cause lost;  // what has become of it; empty while all is well
    // To the peer.
    std::deque<Queued> queue;
    size_t written = 0;  // bytes of the first frame and its data
    std::map<uint64_t, RequestPtr> announced;
    uint64_t next_id = 0;
    // From the peer.
    Frame frame{};
    size_t read = 0;              // bytes of the frame and its data
    RequestPtr receiving;         // what the frame's data goes to
    bool keeping = false;         // it goes to the last one of `unexpected`
    std::vector<char> discarded;  // where it goes when it does not fit
    std::deque<Unexpected> unexpected;
    size_t kept = 0;              // bytes in `unexpected`
    std::map<uint64_t, RequestPtr> cleared;
    std::deque<Reading> reading;
  };

  void lose(int rank, const ConnectionLost& error);
  Cause lost(const Request& request);
  std::string instead_of(const Request& request) const;
  void enqueue(int to, const Frame& frame, RequestPtr request);
  bool match_unexpected(int from, const RequestPtr& request);
  void deliver(int from, const RequestPtr& request, std::deque<Unexpected>::iterator message);
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
  std::deque<RequestPtr> posted_;  // receives without a message
  Batch batch_;
  bool aborted_ = false;
};

}  // namespace cpulaunch
