// cpulaunch's own transport for torch's tensors: transport_hierarchical.hpp does the work, on bytes.

#pragma once

#include "operations.hpp"
#include "transport.hpp"

namespace cpulaunch {

class OwnTransport final : public Transport {
 public:
  explicit OwnTransport(std::shared_ptr<Hierarchy> hierarchy) : hierarchy_(std::move(hierarchy)) {}

  void check_reduction(c10::ScalarType type, Op op) const override;
  bool reduces_bitwise() const override { return true; }
  std::unique_lock<std::mutex> lock() override { return std::unique_lock<std::mutex>(mutex_); }

  Result all_reduce(CclWork& work, const at::Tensor& data, Op op) override;
  Result reduce(CclWork& work, const at::Tensor& from, const at::Tensor& to, Op op, int root) override;
  Result broadcast(CclWork& work, const at::Tensor& data, int root) override;
  Result all_gather(CclWork& work, const Tensors& outputs, const at::Tensor& input) override;
  Result reduce_scatter(CclWork& work, const at::Tensor& output, const Tensors& inputs, Op op) override;
  Result all_to_all(CclWork& work, const Tensors& outputs, const Tensors& inputs) override;
  Result gather(CclWork& work, const Tensors& outputs, const at::Tensor& input, int root) override;
  Result scatter(CclWork& work, const at::Tensor& output, const Tensors& inputs, int root) override;

  // What is in flight holds the hierarchy, which closes its connections when it goes.
  void close(bool) override { hierarchy_.reset(); }

 private:
  Result start(std::vector<OperationPtr> operations);
  Result exchange(std::vector<Part> sent, std::vector<Part> received);

  std::shared_ptr<Hierarchy> hierarchy_;
  std::mutex mutex_;
};

}  // namespace cpulaunch
