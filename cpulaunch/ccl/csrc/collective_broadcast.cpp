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
  const auto data = getRank() == opts.rootRank ? to_send(*work, tensor) : to_receive(*work, tensor);
  work->set_outputs(tensors);
  return run(work, opts.asyncOp, [&](CombinedTransfer& transfers) {
    if (data.numel() == 0) return;
    const auto element = type_to_move(data);
    transfers.add(std::make_unique<OneCclTransfer>(ccl::broadcast(
        data.data_ptr(), element.count(data), element.type, static_cast<int>(opts.rootRank), *communicator_)));
  });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::barrier(const c10d::BarrierOptions& opts) {
  const auto work = begin(OpType::BARRIER, "barrier", "ccl:barrier", {}, opts.timeout);
  // An all_reduce of one byte: oneCCL's own barrier blocks its caller without a time limit.
  const auto token = at::zeros({1}, at::kByte);
  work->keep(token);
  return run(work, opts.asyncOp, [&](CombinedTransfer& transfers) {
    transfers.add(std::make_unique<OneCclTransfer>(ccl::allreduce(token.data_ptr(), token.data_ptr(), 1,
                                                                  ccl::datatype::uint8, ccl::reduction::max,
                                                                  *communicator_)));
  });
}

}  // namespace cpulaunch
