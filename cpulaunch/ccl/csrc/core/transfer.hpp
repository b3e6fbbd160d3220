// Moves one operation's data to and from the other ranks.
//
// A transport (transport.hpp) makes transfers.  An operation of the process group (layer/work.hpp) holds a transfer and
// knows nothing but this interface.  The progress engine drives the transfer through the operation.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "cause.hpp"
#include "interface.h"
#include "pool.hpp"

namespace cpulaunch {

// The ranks call different operations, or use different sizes; the cause has both.
struct Mismatch : std::runtime_error {
  explicit Mismatch(const Cause& cause, std::optional<uint64_t> sequence = std::nullopt)
      : std::runtime_error(cause.text()), cause(cause), sequence(sequence) {}

  Cause cause;
  std::optional<uint64_t> sequence;  // the number of this rank's operation in its transport, if known
};

// Derives from the C struct that other libraries see, which saves a second object for each operation (boundary.cpp).
class Transfer : public cl_transfer {
 public:
  Transfer();
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  static void* operator new(size_t bytes) { return Pool::take(bytes); }
  static void operator delete(void* memory, size_t bytes) { Pool::give(memory, bytes); }

  // Makes as much progress as is possible without waiting.  Returns true once the transfer is done.  Several threads
  // may call it at the same time.  Throws std::exception if the transfer cannot be completed.
  virtual bool test() = 0;

  // Gives up the operation on this rank: no rank may go on with what this one has sent, and from now on test() does
  // nothing.  The transport may still write to the transfer's buffers, so the caller must keep the buffers and this
  // object until the process ends.
  virtual void abort() = 0;

  // The ranks that the transfer waits for, such as "1, 3"; "" if unknown.
  virtual std::string stragglers() = 0;

  // The other rank of a message; -1 if it may be any rank, and nullopt if this is no message.
  virtual std::optional<int> peer() { return std::nullopt; }

  // The ranks of this host that the transfer still needs; -1 stands for any one rank.  For ranks of other hosts, see
  // lost().  nullopt: the transfer may need any rank of the group, and lost() may overlook a rank that is gone.
  virtual std::optional<std::set<int>> needed() { return std::nullopt; }

  // For a message: what peer() has not done yet, such as "sent a message".  Otherwise "".
  virtual std::string missing() { return ""; }

  // The evidence that a peer which the transfer still needs is gone; empty while all is well.
  virtual Cause lost() { return Cause(); }

  // The number of steps done so far; nullopt if the transfer doesn't count them.  While it grows, the peers are at
  // work, too.
  virtual std::optional<uint64_t> steps() const { return std::nullopt; }

  // The test() of one transfer moves the data of all transfers with the same moved_with().
  virtual const void* moved_with() const { return this; }
};

// Several transfers as one, which is done when all of them are.  With none it is done at once.
class CombinedTransfer final : public Transfer {
 public:
  // Must come before the first test().
  void add(std::unique_ptr<Transfer> part) { parts_.push_back(std::move(part)); }

  // Tests every part, so that each call makes progress on all of them.
  bool test() override {
    bool all = true;
    for (const auto& part : parts_) all = part->test() && all;
    return all;
  }

  void abort() override {
    for (const auto& part : parts_) part->abort();
  }

  std::string stragglers() override {
    for (const auto& part : parts_) {
      if (auto ranks = part->stragglers(); !ranks.empty()) return ranks;
    }
    return "";
  }

  std::optional<int> peer() override { return parts_.size() == 1 ? parts_[0]->peer() : std::nullopt; }

  std::optional<std::set<int>> needed() override {
    std::set<int> all;
    for (const auto& part : parts_) {
      const auto ranks = part->needed();
      if (!ranks) return std::nullopt;
      all.insert(ranks->begin(), ranks->end());
    }
    return all;
  }

  std::string missing() override { return parts_.size() == 1 ? parts_[0]->missing() : ""; }

  Cause lost() override {
    for (const auto& part : parts_) {
      if (auto what = part->lost(); !what.empty()) return what;
    }
    return Cause();
  }

  std::optional<uint64_t> steps() const override {
    uint64_t total = 0;
    for (const auto& part : parts_) {
      const auto steps = part->steps();
      if (!steps) return std::nullopt;
      total += *steps;
    }
    return total;
  }

  const void* moved_with() const override {
    for (const auto& part : parts_) {
      if (part->moved_with() != parts_[0]->moved_with()) return this;
    }
    return parts_.empty() ? this : parts_[0]->moved_with();
  }

 private:
  PooledVector<std::unique_ptr<Transfer>> parts_;
};

}  // namespace cpulaunch
