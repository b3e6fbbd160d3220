#include "coalesced_work.hpp"

#include <algorithm>

namespace cpulaunch {

bool CoalescedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

bool CoalescedWork::wait(Milliseconds timeout) {
  const auto until = Clock::now() + timeout;
  for (const auto& work : works_) {
    if (timeout == kNoTimeout) {
      work->wait();
    } else {
      const auto left = std::chrono::duration_cast<Milliseconds>(until - Clock::now());
      work->wait(std::max(left, Milliseconds(1)));
    }
  }
  return true;
}

void CoalescedWork::abort() {
  for (const auto& work : works_) work->abort();
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    const auto outputs = work->result();
    all.insert(all.end(), outputs.begin(), outputs.end());
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  const auto of_tensors = c10::ListType::create(c10::TensorType::get());
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(of_tensors));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures)->then(
      [all = result()](c10::ivalue::Future& completed) {
        if (completed.hasError()) std::rethrow_exception(completed.exception_ptr());
        return c10::IValue(all);
      },
      of_tensors);
}

}  // namespace cpulaunch
