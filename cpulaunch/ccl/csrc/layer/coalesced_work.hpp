// Operations of which the program waits for all together.

#pragma once

#include "work.hpp"

namespace cpulaunch {

class CoalescedWork final : public c10d::Work {
 public:
  using Works = std::vector<c10::intrusive_ptr<CclWork>>;

  CoalescedWork(int rank, Works works) : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Throws what the first of them throws that has failed.
  bool wait(Milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  std::vector<at::Tensor> result() override;
  // Has the tensors of result().
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const Works works_;
};

}  // namespace cpulaunch
