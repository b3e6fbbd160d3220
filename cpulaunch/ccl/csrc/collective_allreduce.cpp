// all_reduce and reduce.

#include "buffers.hpp"
#include "group.hpp"
#include "reduction.hpp"

namespace cpulaunch {

using c10d::OpType;

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto& tensor = single({"all_reduce"}, tensors);
  if (tensor.is_sparse() || is_bitwise(opts.reduceOp)) return gloo_fallback_->allreduce(tensors, opts);
  return allreduce_each(OpType::ALLREDUCE, "all_reduce", tensors, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  if (is_bitwise(opts.reduceOp)) return gloo_fallback_->allreduce_coalesced(tensors, opts);
  return allreduce_each(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", tensors, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allreduce_each(OpType type, const char* name, Tensors& tensors,
                                                                 const c10d::AllreduceOptions& opts) {
  // All tensors are checked first, so that nothing has started when one of them does not fit.
  for (const auto& tensor : tensors) {
    check_tensor({name}, tensor);
    reduction_of(opts.reduceOp, tensor.scalar_type());
    type_to_reduce(tensor, opts.reduceOp);
  }
  const auto work = begin(type, name, "ccl:all_reduce", tensors, opts.timeout);
  Tensors data;
  for (const auto& tensor : tensors) {
    data.push_back(to_exchange(*work, tensor));
    scale_before(opts.reduceOp, data.back());
    scale_after(*work, opts.reduceOp, tensor, getSize());
  }
  work->set_outputs(tensors);
  return run(work, opts.asyncOp, [&](CombinedTransfer& transfers) {
    for (const auto& tensor : data) {
      if (tensor.numel() == 0) continue;
      if (shm_allreduce_ && ShmAllreduce::takes(tensor.scalar_type(), opts.reduceOp)) {
        transfers.add(shm_allreduce_->start(tensor.data_ptr(), tensor.numel(), tensor.scalar_type()));
        continue;
      }
      const auto element = type_to_reduce(tensor, opts.reduceOp);
      const auto reduction = reduction_of(opts.reduceOp, tensor.scalar_type());
      transfers.add(std::make_unique<OneCclTransfer>(ccl::allreduce(
          tensor.data_ptr(), tensor.data_ptr(), element.count(tensor), element.type, reduction, *communicator_)));
    }
  });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Invalid invalid{"reduce"};
  const auto& tensor = single(invalid, tensors);
  c10d::assertRootRank(invalid, opts.rootRank, getSize());
  if (tensor.is_sparse() || is_bitwise(opts.reduceOp)) return gloo_fallback_->reduce(tensors, opts);
  check_tensor(invalid, tensor);
  const auto reduction = reduction_of(opts.reduceOp, tensor.scalar_type());
  const auto element = type_to_reduce(tensor, opts.reduceOp);
  const auto work = begin(OpType::REDUCE, "reduce", "ccl:reduce", tensors, opts.timeout);
  at::Tensor from, to;
  if (getRank() == opts.rootRank) {
    from = to = to_exchange(*work, tensor);
    scale_before(opts.reduceOp, from);
    scale_after(*work, opts.reduceOp, tensor, getSize());
  } else {  // this rank's tensor does not change
    from = to_reduce(*work, opts.reduceOp, to_send(*work, tensor));
    to = at::empty_like(from);
    work->keep(to);
  }
  work->set_outputs(tensors);
  return run(work, opts.asyncOp, [&](CombinedTransfer& transfers) {
    if (from.numel() == 0) return;
    transfers.add(std::make_unique<OneCclTransfer>(ccl::reduce(from.data_ptr(), to.data_ptr(), element.count(from),
                                                               element.type, reduction,
                                                               static_cast<int>(opts.rootRank), *communicator_)));
  });
}

}  // namespace cpulaunch
