// broadcast and barrier.

#include "buffers.hpp"
#include "group.hpp"

namespace cpulaunch {

using c10d::OpType;

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Invalid invalid{"broadcast"};
  const auto& tensor = single(invalid, tensors);
  c10d::assertRootRank(invalid, opts.rootRank, getSize());
  check_tensor(invalid, tensor);
  const auto work = begin(OpType::BROADCAST, "broadcast", "ccl:broadcast", tensors, opts.timeout);
  work->says(static_cast<int>(opts.rootRank));
  const auto data = getRank() == opts.rootRank ? to_send(*work, tensor) : to_receive(*work, tensor);
  work->set_outputs(tensors);
  return run(work, opts.asyncOp, [&](CombinedTransfer& transfers) {
    transfers.add(transport_->broadcast(*work, data, static_cast<int>(opts.rootRank)));
  });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::barrier(const c10d::BarrierOptions& opts) {
  const auto work = begin(OpType::BARRIER, "barrier", "ccl:barrier", {}, opts.timeout);
  const auto token = at::zeros({1}, at::kByte);
  work->keep(token);
  return run(work, opts.asyncOp, [&](CombinedTransfer& transfers) {
    transfers.add(transport_->barrier(*work, token));
  });
}

}  // namespace cpulaunch
