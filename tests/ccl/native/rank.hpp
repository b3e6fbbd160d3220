// A rank that starts collective operations and checks their results.

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "meeting.hpp"
#include "numbers.hpp"
#include "operations.hpp"

namespace cpulaunch {

// What the ranks call.  All ranks draw the same calls.
struct Call {
  using Kind = Signature::Kind;

  // Returns a random call, of any type and size.
  static Call any(std::mt19937_64& random, int ranks);

  Kind kind;
  Source source;
  size_t count;             // numbers in a rank's tensor, or in the longest of its tensors
  bool uneven = false;      // whether the ranks' tensors have different sizes
  bool in_place = false;    // whether the output is one of the inputs, or the input one of the outputs
  int root = -1;            // of a broadcast or a reduce; for an all-to-all, the only rank that gets anything, or -1
  Wire wire = Wire::exact;  // of an all_reduce
};
constexpr Call::Kind kKinds[] = {Call::Kind::all_reduce, Call::Kind::reduce, Call::Kind::all_gather,
                                 Call::Kind::reduce_scatter, Call::Kind::broadcast, Call::Kind::all_to_all};
inline bool has_root(Call::Kind kind) { return kind == Call::Kind::broadcast || kind == Call::Kind::reduce; }

// An operation under way.
class Running {
 public:
  Running(std::string name, std::unique_ptr<Transfer> transfer, std::function<void()> check)
      : name_(std::move(name)), transfer_(std::move(transfer)), check_(std::move(check)) {}

  bool test() const { return transfer_->test(); }
  // Waits until the operation is done.  Throws std::runtime_error if a connection is lost, or after `limit`.
  void wait(std::chrono::milliseconds limit) const;
  // Throws std::runtime_error if a connection is lost.  Asks the ranks it waits for whether they call the same.
  void check_peers() const;
  void abort() const { transfer_->abort(); }
  // Throws std::runtime_error if the result is wrong.
  void check() const;

 private:
  std::string name_;
  std::unique_ptr<Transfer> transfer_;
  std::function<void()> check_;  // holds the memory, too
};

class Rank {
 public:
  Rank(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank), size_(meeting.size()), own_(meeting.join(rank)) {}
  ~Rank() { meeting_.leave(*own_); }

  Running start(const Call& call);

  bool wrong = false;  // whether this rank has wrong numbers

 private:
  using Tensors = std::shared_ptr<std::vector<Numbers>>;

  Numbers numbers(const Source& source, size_t count) const;
  size_t count_of(const Call& call, int rank) const { return call.uneven ? call.count * (rank % 3) / 2 : call.count; }
  Running run(const Call& call, Operations operations, std::function<void()> check);

  std::shared_ptr<char> shared_copy(const Call& call, Numbers& data) const;
  std::shared_ptr<char> in_a_row(const Call& call, std::vector<Numbers>& tensors) const;
  Running all_reduce(const Call& call);
  Running reduce(const Call& call);
  Running all_gather(const Call& call);
  Running reduce_scatter(const Call& call);
  Running broadcast(const Call& call);
  Running all_to_all(const Call& call);

  Meeting& meeting_;
  const int rank_, size_;
  const std::shared_ptr<Hierarchy> own_;
  size_t results_ = 0;
};

}  // namespace cpulaunch
