// broadcast and barrier.

#include "buffers.hpp"
#include "group.hpp"
#include "reduction.hpp"

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
  Collective collective{Kind::broadcast};
  collective.root = static_cast<int>(opts.rootRank);
  collective.received = {part_of(data)};
  return run(work, opts.asyncOp, &collective);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::barrier(const c10d::BarrierOptions& opts) {
  const auto work = begin(OpType::BARRIER, "barrier", "ccl:barrier", {}, opts.timeout);
  const auto token = at::zeros({1}, at::kByte);
  work->keep(token);
  auto collective = reduction(Kind::barrier, token, c10d::ReduceOp::MAX);
  collective.received = {part_of(token)};
  return run(work, opts.asyncOp, &collective);
}

}  // namespace cpulaunch
