// reduce_scatter: from lists of tensors and from single ones, one or several at a time.

#include "buffers.hpp"
#include "group.hpp"
#include "reduction.hpp"

namespace cpulaunch {

using c10d::OpType;

namespace {

void refuse_bitwise(const Invalid& invalid, const c10d::ReduceOp& op) {
  if (is_bitwise(op)) invalid("there are no bitwise reductions here");
}

}  // namespace

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                                 const c10d::ReduceScatterOptions& opts) {
  const Invalid invalid{"reduce_scatter"};
  const auto& output = single(invalid, outputs);
  check_tensor(invalid, output);
  if (inputs.size() != 1) invalid(c10::str("expected one list of inputs, got ", inputs.size()));
  const auto& parts = inputs[0];
  check_list(invalid, parts, getSize(), output);
  if (parts[getRank()].numel() != output.numel()) {
    invalid(c10::str("the output has ", output.numel(), " elements, this rank's input ", parts[getRank()].numel()));
  }
  refuse_bitwise(invalid, opts.reduceOp);
  const auto element = type_to_reduce(output, opts.reduceOp);
  const auto reduction = reduction_of(opts.reduceOp, output.scalar_type());
  const auto work = begin(OpType::REDUCE_SCATTER, "reduce_scatter", "ccl:reduce_scatter", parts, opts.timeout);
  // One reduction to each rank: the parts may differ in size, and need not lie side by side.
  Tensors from, to;
  for (int rank = 0; rank < getSize(); ++rank) {
    from.push_back(to_reduce(*work, opts.reduceOp, to_send(*work, parts[rank])));
    to.push_back(rank == getRank() ? to_receive(*work, output) : at::empty_like(from.back()));
    work->keep(to.back());
  }
  scale_after(*work, opts.reduceOp, output, getSize());
  work->set_outputs(outputs);
  return run(work, opts.asyncOp, [&](CombinedTransfer& transfers) {
    for (int rank = 0; rank < getSize(); ++rank) {
      if (from[rank].numel() == 0) continue;
      transfers.add(std::make_unique<OneCclTransfer>(ccl::reduce(from[rank].data_ptr(), to[rank].data_ptr(),
                                                                 element.count(from[rank]), element.type, reduction,
                                                                 rank, *communicator_)));
    }
  });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                       const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensors(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", outputs, inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return reduce_scatter_tensors(OpType::COALESCED, "reduce_scatter_tensor_coalesced", outputs, inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::reduce_scatter_tensors(OpType type, const char* name,
                                                                         Tensors& outputs, Tensors& inputs,
                                                                         const c10d::ReduceScatterOptions& opts) {
  const Invalid invalid{name};
  if (outputs.size() != inputs.size()) invalid(c10::str(outputs.size(), " outputs for ", inputs.size(), " inputs"));
  refuse_bitwise(invalid, opts.reduceOp);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(invalid, inputs[i]);
    check_tensors(invalid, {outputs[i]}, inputs[i]);
    if (inputs[i].numel() != outputs[i].numel() * getSize()) {
      invalid(c10::str("the input has ", inputs[i].numel(), " elements, not ", getSize(), " times the output's ",
                       outputs[i].numel()));
    }
    type_to_reduce(inputs[i], opts.reduceOp);
    reduction_of(opts.reduceOp, inputs[i].scalar_type());
  }
  const auto work = begin(type, name, "ccl:_reduce_scatter_base", inputs, opts.timeout);
  Tensors from, to;
  for (size_t i = 0; i < inputs.size(); ++i) {
    from.push_back(to_reduce(*work, opts.reduceOp, apart_from(*work, outputs[i], to_send(*work, inputs[i]))));
    to.push_back(to_receive(*work, outputs[i]));
    scale_after(*work, opts.reduceOp, outputs[i], getSize());
  }
  work->set_outputs(outputs);
  return run(work, opts.asyncOp, [&](CombinedTransfer& transfers) {
    for (size_t i = 0; i < from.size(); ++i) {
      if (to[i].numel() == 0) continue;
      const auto element = type_to_reduce(to[i], opts.reduceOp);
      transfers.add(std::make_unique<OneCclTransfer>(
          ccl::reduce_scatter(from[i].data_ptr(), to[i].data_ptr(), element.count(to[i]), element.type,
                              reduction_of(opts.reduceOp, to[i].scalar_type()), *communicator_)));
    }
  });
}

}  // namespace cpulaunch
