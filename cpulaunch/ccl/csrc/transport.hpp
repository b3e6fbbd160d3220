// What carries a group's collectives: cpulaunch's own (transport_own.hpp) or oneCCL (transport_oneccl.hpp).

#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "arithmetic.hpp"
#include "transfer.hpp"
#include "work.hpp"

namespace cpulaunch {

// All tensors are contiguous host memory and stay alive until the transfer is done.  Lists have a tensor for each rank
// of the group, or are empty where this rank has no part.  What a transport needs beside them it keeps in the
// operation, `work`.  A transport divides averages; what is scaled before it is summed is scaled by the caller.
class Transport {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Result = std::unique_ptr<Transfer>;
  using Op = c10d::ReduceOp::RedOpType;

  virtual ~Transport() = default;

  // Throws where it can't reduce this: TypeError for types, ValueError for reductions.
  virtual void check_reduction(c10::ScalarType type, Op op) const = 0;
  // Bitwise reductions: by all_reduce and reduce, and by reduce_scatter.
  virtual bool reduces_bitwise() const = 0;
  virtual bool scatters_bitwise() const { return reduces_bitwise(); }
  // The number of hosts between which it can send sums as Wire says; 0: it sends them as they are.
  virtual int compressing_hosts() const { return 0; }

  // The ranks start the same operations in the same order; so one thread at a time may start some.
  virtual std::unique_lock<std::mutex> lock() = 0;

  virtual Result all_reduce(CclWork& work, const at::Tensor& data, Op op, Wire wire) = 0;
  // Only the root's `to` gets the result; the others' is room to work in.
  virtual Result reduce(CclWork& work, const at::Tensor& from, const at::Tensor& to, Op op, int root) = 0;
  virtual Result broadcast(CclWork& work, const at::Tensor& data, int root) = 0;
  virtual Result all_gather(CclWork& work, const Tensors& outputs, const at::Tensor& input) = 0;
  virtual Result reduce_scatter(CclWork& work, const at::Tensor& output, const Tensors& inputs, Op op) = 0;
  virtual Result all_to_all(CclWork& work, const Tensors& outputs, const Tensors& inputs) = 0;
  virtual Result gather(CclWork& work, const Tensors& outputs, const at::Tensor& input, int root) = 0;
  virtual Result scatter(CclWork& work, const at::Tensor& output, const Tensors& inputs, int root) = 0;
  // The token is one number.  oneCCL's own barrier would block its caller without a time limit.
  virtual Result barrier(CclWork& work, const at::Tensor& token) {
    return all_reduce(work, token, Op::MAX, Wire::exact);
  }

  // Messages from one rank to another, in any order of tags.  `source` becomes the rank that the message came from;
  // `from` may be kAnySource.
  static constexpr int kAnySource = -1;
  virtual bool has_messages() const = 0;
  virtual Result send(const at::Tensor& tensor, int to, int tag) = 0;
  virtual Result receive(const at::Tensor& tensor, int from, int tag, std::shared_ptr<int> source) = 0;

  // Whether ranks reduce a tensor without copying it where it lies in shared memory.
  virtual bool shares_memory() const { return false; }

  // Throws Mismatch where it is known that ranks have called different collectives, though none that this rank has
  // called could tell.
  virtual void check_calls() {}

  // Nothing is in flight, or else `in_flight`: then what an operation may still use must stay.
  virtual void close(bool in_flight) = 0;
};

}  // namespace cpulaunch
