// oneCCL as a transport: its events as transfers, its types and torch's, and a key-value store for its bootstrap.

#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include <oneapi/ccl.hpp>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transfer.hpp"

namespace cpulaunch {

// One thread at a time may be inside oneCCL.  It is called only while this lock is held.
std::unique_lock<std::mutex> enter_oneccl();

// An operation of oneCCL's that has been started.
class OneCclTransfer final : public Transfer {
 public:
  explicit OneCclTransfer(ccl::event event) : event_(std::move(event)) {}

  bool test() override;
  // oneCCL cannot cancel an operation.  Peers that need more than what has been sent wait until their watchdog sees
  // this rank's failure.
  void abort() override { aborted_.store(true, std::memory_order_release); }
  std::string stragglers() override { return ""; }

 private:
  std::optional<ccl::event> event_;  // used under the lock; destroyed there, as that gives oneCCL its request back
  // Release and acquire: a thread that sees `done_` without the lock sees the data that another one has received.
  std::atomic<bool> done_{false};
  std::atomic<bool> aborted_{false};
};

// oneCCL finds its peers through torch's store, so that a group needs no address of its own.
//
// oneCCL's barriers ask for the same keys again and again, without a pause.  Where ranks share cores, that keeps the
// store's one thread, in rank 0, from answering those that still have to arrive: eight ranks on two cores took minutes,
// or did not meet within oneCCL's limit.  So a rank that asks in vain sleeps a little, longer each time.
class StoreKvs final : public ccl::kvs_interface {
 public:
  StoreKvs(c10::intrusive_ptr<c10d::Store> store, int id) : store_(std::move(store)), id_(id) {}

  // Empty while the key is missing: oneCCL asks again.  Called by one thread.
  ccl::vector_class<char> get(const ccl::string_class& key) override;
  void set(const ccl::string_class& key, const ccl::vector_class<char>& data) override;
  int get_id() override { return id_; }

 private:
  void back_off_if_unchanged(const std::string& key, const std::string& value);

  c10::intrusive_ptr<c10d::Store> store_;
  int id_;
  std::unordered_map<std::string, std::string> seen_;  // key → the last answer
  std::string round_;  // the key at which a round of queries in vain begins
  std::chrono::microseconds backoff_{0};
};

// The type that oneCCL is given for a tensor's elements, and how many of it make up one of them: a complex number is
// two of its parts, for example.
struct ElementType {
  ccl::datatype type;
  size_t per_element;

  size_t count(const at::Tensor& tensor) const { return tensor.numel() * per_element; }
};

// For operations that only move data: any type, by its size.
ElementType type_to_move(const at::Tensor& tensor);
// For reductions.  Throws for types that oneCCL does not reduce.
ElementType type_to_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);

// Throws for what is not a plain reduction (the bitwise ones).
ccl::reduction reduction_of(c10d::ReduceOp::RedOpType op, c10::ScalarType type);

}  // namespace cpulaunch
