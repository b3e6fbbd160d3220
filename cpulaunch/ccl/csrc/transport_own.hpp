// cpulaunch's own transport for torch's tensors.  Hierarchy and PointToPoint do the work, on bytes.

#pragma once

#include "operations.hpp"
#include "point_to_point.hpp"
#include "transport.hpp"

namespace cpulaunch {

class OwnTransport : public Transport {
 public:
  OwnTransport(std::shared_ptr<Hierarchy> hierarchy, std::shared_ptr<PointToPoint> messages)
      : hierarchy_(std::move(hierarchy)), messages_(std::move(messages)) {}

  void check_reduction(c10::ScalarType type, Op op) const override;
  bool reduces_bitwise() const override { return true; }
  int compressing_hosts() const override { return hierarchy_->layout.hosts; }
  std::unique_lock<std::mutex> lock() override { return std::unique_lock<std::mutex>(mutex_); }

  Result all_reduce(CclWork& work, const at::Tensor& data, Op op, Wire wire) override;
  Result reduce(CclWork& work, const at::Tensor& from, const at::Tensor& to, Op op, int root) override;
  Result broadcast(CclWork& work, const at::Tensor& data, int root) override;
  Result all_gather(CclWork& work, const Tensors& outputs, const at::Tensor& input) override;
  Result reduce_scatter(CclWork& work, const at::Tensor& output, const Tensors& inputs, Op op) override;
  Result all_to_all(CclWork& work, const Tensors& outputs, const Tensors& inputs) override;
  Result gather(CclWork& work, const Tensors& outputs, const at::Tensor& input, int root) override;
  Result scatter(CclWork& work, const at::Tensor& output, const Tensors& inputs, int root) override;
  Result barrier(CclWork& work, const at::Tensor& token) override;

  bool has_messages() const override { return true; }
  Result send(const at::Tensor& tensor, int to, int tag) override;
  Result receive(const at::Tensor& tensor, int from, int tag, std::shared_ptr<int> source) override;

  bool shares_memory() const override { return hierarchy_->layout.locals > 1; }

  void check_calls() override { hierarchy_->check_unasked(); }

  // What is in flight holds these two, whose connections are closed when they go.
  void close(bool in_flight) override {
    if (!in_flight) hierarchy_->leave();
    hierarchy_.reset();
    messages_.reset();
  }

 private:
  Result start(std::vector<OperationPtr> operations);
  // `signature` says what the caller has called; type, reduction and size are those of the tensor.
  Result reduce_in_place(const at::Tensor& data, Op op, Signature signature);
  Result exchange(std::vector<Part> sent, std::vector<Part> received, const Signature& signature);

  std::shared_ptr<Hierarchy> hierarchy_;
  std::shared_ptr<PointToPoint> messages_;
  std::mutex mutex_;
};

}  // namespace cpulaunch
