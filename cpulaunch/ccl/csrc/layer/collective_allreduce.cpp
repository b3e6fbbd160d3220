// all_reduce and reduce.

#include <c10/util/SmallVector.h>

#include "buffers.hpp"
#include "group.hpp"
#include "reduction.hpp"

namespace cpulaunch {

using c10d::OpType;

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto& tensor = single({"all_reduce"}, tensors);
  if (tensor.is_sparse() || lacks(opts.reduceOp)) return gloo().allreduce(tensors, opts);
  return allreduce_each(OpType::ALLREDUCE, "all_reduce", tensors, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::average_compressed(const at::Tensor& tensor) {
  c10d::AllreduceOptions opts;
  opts.reduceOp = c10d::ReduceOp::AVG;
  opts.asyncOp = true;
  Tensors tensors{tensor};
  return allreduce_each(OpType::ALLREDUCE, "average_compressed", tensors, opts, Wire::bfloat16);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  if (lacks(opts.reduceOp)) return gloo().allreduce_coalesced(tensors, opts);
  return allreduce_each(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", tensors, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allreduce_each(OpType type, const char* name, Tensors& tensors,
                                                                 const c10d::AllreduceOptions& opts, Wire wire) {
  // Check all tensors first, so that nothing has started if one of them is refused.
  for (const auto& tensor : tensors) {
    check_tensor({name}, tensor);
    check_reduction(tensor.scalar_type(), opts.reduceOp);
  }
  const auto work = begin(type, name, "ccl:all_reduce", tensors, opts.timeout);
  work->says(-1, name_of(opts.reduceOp));
  Tensors data;
  for (const auto& tensor : tensors) {
    data.push_back(to_exchange(*work, tensor));
    scale_before(opts.reduceOp, data.back());
  }
  work->set_outputs(tensors);
  c10::SmallVector<Collective, 1> collectives;  // usually one, which then needs no allocation
  for (const auto& tensor : data) {
    collectives.push_back(reduction(Kind::all_reduce, tensor, opts.reduceOp));
    collectives.back().wire = wire;
    collectives.back().received = {part_of(tensor)};
  }
  return run(work, opts.asyncOp, collectives.data(), collectives.size());
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Invalid invalid{"reduce"};
  const auto& tensor = single(invalid, tensors);
  c10d::assertRootRank(invalid, opts.rootRank, getSize());
  if (tensor.is_sparse() || lacks(opts.reduceOp)) return gloo().reduce(tensors, opts);
  check_tensor(invalid, tensor);
  check_reduction(tensor.scalar_type(), opts.reduceOp);
  const auto work = begin(OpType::REDUCE, "reduce", "ccl:reduce", tensors, opts.timeout);
  work->says(static_cast<int>(opts.rootRank), name_of(opts.reduceOp));
  at::Tensor from, to;
  if (getRank() == opts.rootRank) {
    from = to = to_exchange(*work, tensor);
    scale_before(opts.reduceOp, from);
  } else {  // this rank's tensor must not change
    from = to_reduce(*work, opts.reduceOp, to_send(*work, tensor));
    to = at::empty_like(from);
    work->keep(to);
  }
  work->set_outputs(tensors);
  auto collective = reduction(Kind::reduce, from, opts.reduceOp);
  collective.root = static_cast<int>(opts.rootRank);
  collective.sent = {part_of(from)};
  collective.received = {part_of(to)};
  return run(work, opts.asyncOp, &collective);
}

bool ProcessGroupCCL::lacks(const c10d::ReduceOp& op) const {
  return is_bitwise(reduction_of(op)) && transport_ && !transport_->abilities.bitwise;
}

}  // namespace cpulaunch
