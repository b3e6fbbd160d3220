// The way of one operation's data to and from the other ranks.
//
// A transport (transport.hpp) makes transfers.  An operation of torch's (layer/work.hpp) holds one and knows it by this
// interface only; the progress engine drives it through the operation.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cause.hpp"
#include "interface.h"

namespace cpulaunch {

// The ranks call different operations, or with different sizes; the cause says which.
struct Mismatch : std::runtime_error {
  explicit Mismatch(const Cause& cause, std::optional<uint64_t> sequence = std::nullopt)
      : std::runtime_error(cause.text()), cause(cause), sequence(sequence) {}

  Cause cause;
  std::optional<uint64_t> sequence;  // of this rank's operation, among its transport's, where that is known
};

// Each is a struct of C, too, as other libraries know it: that saves an object for each operation (boundary.cpp).
class Transfer : public cl_transfer {
 public:
  Transfer();
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Makes the progress that is possible now, without waiting for anybody.  True once the transfer is done.
  // Several threads may call it at the same time.  Throws std::exception when the transfer cannot be completed.
  virtual bool test() = 0;

  // This rank gives up: no rank may go on with what this one has sent, and test() does nothing any more.  The
  // transport may still write to the transfer's buffers.  The caller therefore keeps the buffers and this object
  // until the process ends.
  virtual void abort() = 0;

  // The ranks that the transfer waits for, such as "1, 3"; "" where that is unknown.
  virtual std::string stragglers() = 0;

  // The other rank of a message, or -1 where any one will do; nullopt: it is no message.
  virtual std::optional<int> peer() { return std::nullopt; }

  // The ranks of this host without which it cannot be completed, or -1 where any one will do; lost() tells of those of
  // other hosts.  nullopt: as far as is known it needs all of the group, and lost() may not tell.
  virtual std::optional<std::set<int>> needed() { return std::nullopt; }

  // What that rank has not done yet, such as "sent a message"; "" where there is no such rank.
  virtual std::string missing() { return ""; }

  // What tells that a peer which the transfer still needs is gone; empty while all is well.
  virtual Cause lost() { return Cause(); }

  // The number of steps done so far; nullopt where the transfer doesn't count them.  While it grows, the peers are at
  // work, too.
  virtual std::optional<uint64_t> steps() const { return std::nullopt; }

  // The test() of one transfer moves the data of all that give the same here.
  virtual const void* moved_with() const { return this; }
};

// All of several transfers, each by a transport of its own.  Without any it is done at once.
class CombinedTransfer final : public Transfer {
 public:
  // Before the first test().
  void add(std::unique_ptr<Transfer> part) { parts_.push_back(std::move(part)); }

  // Each part is tested, so that each call makes progress on all of them.
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
  std::vector<std::unique_ptr<Transfer>> parts_;
};

}  // namespace cpulaunch
