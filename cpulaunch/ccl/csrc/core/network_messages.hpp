// What all networks have in common: each message begins with a header, by which it finds what expects it.
//
// Headers arrive in the order in which a rank has sent its messages.  A header that no receive() has asked for yet
// waits, and holds up the headers behind it.

#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "connector.hpp"
#include "fifo.hpp"
#include "layout.hpp"
#include "network.hpp"

namespace cpulaunch {

class MessageNetwork : public Network {
 public:
  void receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes, int& pending) override;
  void enter(const Signature& signature) override;
  void check_unasked() override;
  bool may_get_unasked() const override {
    return current_ && current_->root >= 0 && Clock::now() - entered_ < kLongestWay;
  }
  const Cause& lost() override;
  std::vector<int> awaited() const override { return awaited_by({this}); }
  // The same for several networks, which carry the messages of one group.
  static std::vector<int> awaited_by(const std::vector<const MessageNetwork*>& networks);

  // What a message begins with.
  struct Header {
    Tag tag;
    Signature signature;
    uint64_t bytes;  // of the message
  };

 protected:
  // `bytes` are those that this network carries: the whole message, or a stripe of it (network_striped.hpp).
  struct Sent {
    Header header{};
    const char* data = nullptr;
    size_t bytes = 0;
    int* pending = nullptr;
  };
  struct Expected {
    Header header;  // the message has to begin with it
    char* data;
    size_t bytes;
    int* pending;
    size_t parts = 0;  // that are on their way to `data`, apart from the header
  };
  struct Incoming {
    std::optional<uint64_t> asked;   // the operation that this rank has asked about last
    bool in_message = false;         // `header` is of the message that is being received
    bool in_header = false;          // `header` is of a message that no receive() has asked for yet
    Header header{};
    Fifo<Expected> expected;         // begins with the message that is being received
  };
  // The phase in the tag of a message that asks whether its receiver calls the same.
  static constexpr uint16_t kQuestion = 0xffff;

  MessageNetwork(const Layout& layout, std::shared_ptr<Connector> connector)
      : members_(layout.members), connector_(std::move(connector)), incoming_(layout.size) {
    receiving_.reserve(layout.size);
  }

  void expect(int from, const Expected& message);
  // Puts the next header that has arrived from a rank in its `header`.  Returns false if none has arrived.
  virtual bool take_header(int from) = 0;
  // Looks for a header from a rank, also if nothing is expected from it.  Returns false if none can have arrived.  May
  // throw ConnectionLost.
  virtual bool look(int from) = 0;
  // Returns why nothing more can arrive from a rank from which something is expected; empty while all is well.
  virtual std::string why_lost(int from) = 0;
  // Sends the header of a question, which has no data.  Does nothing if the rank can't be reached.
  virtual void send_question(int to, const Sent& question) = 0;
  virtual std::vector<int> sending() const = 0;  // ranks with messages to send

  // Takes the next header of a message, and answers the questions before it.  Returns false if none has arrived.
  bool read_header(int from);
  // Moves what expects the next message to the front of `expected`.  Returns false if nothing expects it yet.
  bool begin_message(int from);
  // Calls `keep` for each rank, and removes those for which it returns false.  It may add ranks.
  template <class Keep>
  static void keep_if(std::vector<int>& ranks, const Keep& keep) {
    for (size_t i = 0; i < ranks.size();) {
      if (keep(ranks[i])) {
        ++i;
      } else {
        ranks[i] = ranks.back();
        ranks.pop_back();
      }
    }
  }
  // After each call of progress().
  void check_when_idle(size_t moved);
  void lose(int peer, const std::string& what);

  const Members members_;
  const std::shared_ptr<Connector> connector_;
  std::vector<Incoming> incoming_;  // of each rank
  std::vector<int> receiving_;      // ranks from which some messages are expected
  std::optional<Signature> current_;
  int questions_ = 0;  // under way
  Cause lost_;

 private:
  // The longest time that a small message takes to another host, also if that host's processors are busy.
  static constexpr std::chrono::milliseconds kLongestWay{50};

  void ask(int rank);
  bool answer(int from);

  Clock::time_point entered_;  // when the current operation was called, if it has a root
  unsigned idle_calls_ = 0;    // of progress(), since something has moved
};

}  // namespace cpulaunch
