// oneCCL as a transport.

#pragma once

#include <memory>
#include <mutex>

#include <oneapi/ccl.hpp>

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport.hpp"

namespace cpulaunch {

// Connects the ranks through `store`.  Throws std::exception when they don't meet within oneCCL's own time.
std::unique_ptr<ccl::communicator> connect_oneccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);
// `in_flight`: some of its operations are.
void disconnect_oneccl(std::unique_ptr<ccl::communicator> communicator, bool in_flight);
// Starts an operation of oneCCL's, which `call` calls.
std::unique_ptr<Transfer> start_oneccl(c10::function_ref<ccl::event()> call);

// Throws where oneCCL can't reduce this, as Transport::check_reduction().
void check_oneccl_reduction(c10::ScalarType type, Transport::Op op);

class OneCclTransport final : public Transport {
 public:
  // Throws as connect_oneccl().
  OneCclTransport(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
      : rank_(rank), size_(size), communicator_(connect_oneccl(store, rank, size)) {}

  void check_reduction(c10::ScalarType type, Op op) const override { check_oneccl_reduction(type, op); }
  bool reduces_bitwise() const override { return false; }
  std::unique_lock<std::mutex> lock() override { return std::unique_lock<std::mutex>(mutex_); }

  Result all_reduce(CclWork& work, const at::Tensor& data, Op op, Wire wire) override;
  Result reduce(CclWork& work, const at::Tensor& from, const at::Tensor& to, Op op, int root) override;
  Result broadcast(CclWork& work, const at::Tensor& data, int root) override;
  Result all_gather(CclWork& work, const Tensors& outputs, const at::Tensor& input) override;
  Result reduce_scatter(CclWork& work, const at::Tensor& output, const Tensors& inputs, Op op) override;
  Result all_to_all(CclWork& work, const Tensors& outputs, const Tensors& inputs) override;
  Result gather(CclWork& work, const Tensors& outputs, const at::Tensor& input, int root) override;
  Result scatter(CclWork& work, const at::Tensor& output, const Tensors& inputs, int root) override;

  // oneCCL has them for GPUs only.
  bool has_messages() const override { return false; }
  Result send(const at::Tensor&, int, int) override { TORCH_CHECK(false, "oneCCL sends no messages"); }
  Result receive(const at::Tensor&, int, int, std::shared_ptr<int>) override {
    TORCH_CHECK(false, "oneCCL receives no messages");
  }

  void close(bool in_flight) override { disconnect_oneccl(std::move(communicator_), in_flight); }

 private:
  Result exchange(const at::Tensor& to, const std::vector<int64_t>& received, const at::Tensor& from,
                  const std::vector<int64_t>& sent);

  const int rank_, size_;
  std::unique_ptr<ccl::communicator> communicator_;
  std::mutex mutex_;
};

}  // namespace cpulaunch
