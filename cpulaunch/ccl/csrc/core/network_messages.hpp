// What all networks have in common: each message begins with a header, by which it finds what expects it.
//
// Headers come in the order in which a rank has sent its messages.  A header that nobody has asked for yet waits, and
// so do those behind it.

#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "connector.hpp"
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
  std::vector<int> awaited() const override;

 protected:
  struct Header {
    Tag tag;
    Signature signature;
    uint64_t bytes;
  };
  struct Sent {
    Header header{};
    const char* data = nullptr;
    int* pending = nullptr;
  };
  struct Expected {
    Tag tag;
    Signature signature;
    char* data;
    size_t bytes;
    int* pending;
    size_t parts = 0;  // that are on their way to `data`, apart from the header
  };
  struct Incoming {
    std::optional<uint64_t> asked;  // about the operation with this number
    Silent silent;                  // while nothing has come
    bool in_message = false;        // `header` is of a message whose expected data has partly come
    bool in_header = false;         // `header` is of a message that nobody has asked for yet
    Header header{};
    std::vector<Expected> expected;  // with the one that is being received in front
  };
  // The phase in the tag of a message that asks whether its receiver calls the same.
  static constexpr uint16_t kQuestion = 0xffff;

  MessageNetwork(const Layout& layout, std::shared_ptr<Connector> connector)
      : members_(layout.members), connector_(std::move(connector)), incoming_(layout.size) {}

  // Puts the next header that has come from a rank in its `header`; false where none has.
  virtual bool take_header(int from) = 0;
  // Looks for headers of a rank that nothing may be expected from; false where none can come yet.  May throw
  // ConnectionLost.
  virtual bool look(int from) = 0;
  // What has become of a rank from which something is expected; empty when all is well.
  virtual std::string why_lost(int from) = 0;
  // Sends the header alone, unless it is known that the rank can't be reached.
  virtual void send_question(int to, const Sent& question) = 0;
  virtual std::vector<int> sending() const = 0;  // ranks with messages to send

  // Takes the next header, past questions that are answered; true when there is one.
  bool read_header(int from);
  // True when the next message is expected: that is in front now.
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
  // Of a message to another host that needn't wait for others: also where that host's processors are busy.
  static constexpr std::chrono::milliseconds kLongestWay{50};

  void ask(int rank);
  bool answer(int from);

  Clock::time_point entered_;  // when the current operation was called, if it has a root
  unsigned idle_calls_ = 0;    // of progress(), since something has moved
};

}  // namespace cpulaunch
