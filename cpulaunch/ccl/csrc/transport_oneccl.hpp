// oneCCL as a transport.

#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include <oneapi/ccl.hpp>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport.hpp"

namespace cpulaunch {

// One thread at a time may be inside oneCCL.  It is called only while this lock is held.
std::unique_lock<std::mutex> enter_oneccl();

class OneCclTransport final : public Transport {
 public:
  // Connects the ranks through `store`.  Throws std::exception when they don't meet within oneCCL's own time.
  OneCclTransport(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

  void check_reduction(c10::ScalarType type, Op op) const override;
  bool reduces_bitwise() const override { return false; }
  std::unique_lock<std::mutex> lock() override { return enter_oneccl(); }

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

  void close(bool in_flight) override;

 private:
  Result exchange(const at::Tensor& to, const std::vector<int64_t>& received, const at::Tensor& from,
                  const std::vector<int64_t>& sent);

  const int rank_, size_;
  std::unique_ptr<ccl::communicator> communicator_;
};

}  // namespace cpulaunch
