// oneCCL's types and torch's, and a key-value store for its bootstrap.

#pragma once

#include <chrono>
#include <string>
#include <unordered_map>

#include <oneapi/ccl.hpp>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace cpulaunch {

// oneCCL meets its peers through torch's store, so that a group needs no address of its own.
//
// Its barriers ask for the same keys again and again, without a pause.  Where ranks share cores, all of them
// asking at once keep the store's one thread, in rank 0, from answering those who still have to arrive: eight
// ranks on two cores took minutes, or did not meet within oneCCL's limit.  So who asks in vain sleeps a little.
class StoreKvs final : public ccl::kvs_interface {
 public:
  StoreKvs(c10::intrusive_ptr<c10d::Store> store, int id) : store_(std::move(store)), id_(id) {}

  // Empty while the key is missing: oneCCL asks again.  Called by one thread.
  ccl::vector_class<char> get(const ccl::string_class& key) override;
  void set(const ccl::string_class& key, const ccl::vector_class<char>& data) override;
  int get_id() override { return id_; }

 private:
  void nap_if_in_vain(const std::string& key, const std::string& value);

  c10::intrusive_ptr<c10d::Store> store_;
  int id_;
  std::unordered_map<std::string, std::string> seen_;  // key → the last answer
  std::string round_;  // the key at which a round of questions in vain begins
  std::chrono::microseconds nap_{0};
};

// The elements of a tensor as oneCCL counts them.
struct Cells {
  ccl::datatype type;
  size_t per_element;  // a complex number is two of its parts, for example
};

// For operations that only move data: any type, by its size.
Cells cells_to_move(const at::Tensor& tensor);
// For reductions.  Throws for types that oneCCL does not reduce.
Cells cells_to_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);

// Throws for what is not a plain reduction (the bitwise ones).
ccl::reduction reduction_of(c10d::ReduceOp::RedOpType op, c10::ScalarType type);

}  // namespace cpulaunch
