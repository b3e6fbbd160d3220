// reduce_scatter of lists of tensors and of single tensors, one or several at a time.

#include "buffers.hpp"
#include "group.hpp"
#include "reduction.hpp"

namespace cpulaunch {

using c10d::OpType;

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
  check_scattered(invalid, output, opts.reduceOp);
  const auto work = begin(OpType::REDUCE_SCATTER, "reduce_scatter", "ccl:reduce_scatter", parts, opts.timeout);
  work->says(-1, name_of(opts.reduceOp));
  Tensors from;
  for (const auto& part : parts) {
    from.push_back(to_reduce(*work, opts.reduceOp, apart_from(*work, output, to_send(*work, part))));
  }
  const auto to = to_receive(*work, output);
  work->set_outputs(outputs);
  auto collective = reduction(Kind::reduce_scatter, to, opts.reduceOp);
  collective.sent = parts_of(from);
  collective.received = {part_of(to)};
  return run(work, opts.asyncOp, &collective);
}

void ProcessGroupCCL::check_scattered(const Invalid& invalid, const at::Tensor& output,
                                      const c10d::ReduceOp& op) const {
  check_reduction(output.scalar_type(), op);
  if (is_bitwise(reduction_of(op)) && !transport(invalid.operation).abilities.bitwise) {
    invalid("oneCCL has no bitwise reductions; use all_reduce, which goes through gloo, and take this rank's part");
  }
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
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(invalid, inputs[i]);
    check_tensors(invalid, {outputs[i]}, inputs[i]);
    if (inputs[i].numel() != outputs[i].numel() * getSize()) {
      invalid(c10::str("the input has ", inputs[i].numel(), " elements, not ", getSize(), " times the output's ",
                       outputs[i].numel()));
    }
    check_scattered(invalid, outputs[i], opts.reduceOp);
  }
  const auto work = begin(type, name, "ccl:_reduce_scatter_base", inputs, opts.timeout);
  work->says(-1, name_of(opts.reduceOp));
  Tensors from, to;
  for (size_t i = 0; i < inputs.size(); ++i) {
    from.push_back(to_reduce(*work, opts.reduceOp, apart_from(*work, outputs[i], to_send(*work, inputs[i]))));
    to.push_back(to_receive(*work, outputs[i]));
  }
  work->set_outputs(outputs);
  std::vector<Collective> collectives;
  for (size_t i = 0; i < from.size(); ++i) {
    collectives.push_back(reduction(Kind::reduce_scatter, to[i], opts.reduceOp));
    collectives.back().sent = split_buffer(from[i], std::vector<int64_t>(getSize(), to[i].numel()));
    collectives.back().received = {part_of(to[i])};
  }
  return run(work, opts.asyncOp, collectives);
}

}  // namespace cpulaunch
