// Several operations behind one handle: waiting for it waits for all of them.

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
  // If several operations have failed, throws the error of the one that started first.
  bool wait(Milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  std::vector<at::Tensor> result() override;
  // The future's value is that of result().
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const Works works_;
};

}  // namespace cpulaunch
