// all_gather into lists of tensors and into single tensors, one or several at a time.

#include "buffers.hpp"
#include "group.hpp"

namespace cpulaunch {

using c10d::OpType;

namespace {

Collective gathering(Parts to, const at::Tensor& from) {
  Collective collective{Kind::all_gather};
  collective.sent = {part_of(from)};
  collective.received = std::move(to);
  return collective;
}

}  // namespace

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& opts) {
  const Invalid invalid{"all_gather"};
  single(invalid, inputs);
  if (outputs.size() != 1) invalid(c10::str("expected one list of outputs, got ", outputs.size()));
  return allgather_lists(OpType::ALLGATHER, "all_gather", outputs, inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                                      const c10d::AllgatherOptions& opts) {
  const Invalid invalid{"all_gather_coalesced"};
  if (static_cast<int>(outputs.size()) != getSize()) {
    invalid(c10::str("expected ", getSize(), " output lists, got ", outputs.size()));
  }
  // torch passes a list for each rank, with one tensor for each input; allgather_lists() needs it the other way round.
  std::vector<Tensors> of_input(inputs.size());
  for (const auto& of_rank : outputs) {
    if (of_rank.size() != inputs.size()) {
      invalid(c10::str("expected ", inputs.size(), " outputs for each rank, got ", of_rank.size()));
    }
    for (size_t i = 0; i < inputs.size(); ++i) of_input[i].push_back(of_rank[i]);
  }
  return allgather_lists(OpType::ALLGATHER_COALESCED, "all_gather_coalesced", of_input, inputs, opts);
}

// `outputs` has a list for each input, with one tensor for each rank.
ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allgather_lists(OpType type, const char* name,
                                                                  std::vector<Tensors>& outputs, Tensors& inputs,
                                                                  const c10d::AllgatherOptions& opts) {
  const Invalid invalid{name};
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(invalid, inputs[i]);
    check_list(invalid, outputs[i], getSize(), inputs[i]);
    const auto& own = outputs[i][getRank()];
    if (own.numel() != inputs[i].numel()) {
      invalid(c10::str("this rank sends ", inputs[i].sizes(), " and has room for ", own.sizes()));
    }
  }
  const auto work = begin(type, name, "ccl:all_gather", inputs, opts.timeout);
  Tensors from, all;
  std::vector<Tensors> to;
  for (size_t i = 0; i < inputs.size(); ++i) {
    from.push_back(to_send(*work, inputs[i]));
    to.push_back(to_receive(*work, outputs[i]));
    all.insert(all.end(), outputs[i].begin(), outputs[i].end());
  }
  work->set_outputs(std::move(all));
  std::vector<Collective> collectives;
  for (size_t i = 0; i < from.size(); ++i) collectives.push_back(gathering(parts_of(to[i]), from[i]));
  return run(work, opts.asyncOp, collectives);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                  const c10d::AllgatherOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return allgather_tensors(OpType::_ALLGATHER_BASE, "all_gather_into_tensor", outputs, inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return allgather_tensors(OpType::COALESCED, "all_gather_into_tensor_coalesced", outputs, inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allgather_tensors(OpType type, const char* name, Tensors& outputs,
                                                                    Tensors& inputs,
                                                                    const c10d::AllgatherOptions& opts) {
  const Invalid invalid{name};
  if (outputs.size() != inputs.size()) invalid(c10::str(outputs.size(), " outputs for ", inputs.size(), " inputs"));
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(invalid, inputs[i]);
    check_tensors(invalid, {outputs[i]}, inputs[i]);
    if (outputs[i].numel() != inputs[i].numel() * getSize()) {
      invalid(c10::str("the output has ", outputs[i].numel(), " elements, not ", getSize(), " times the input's ",
                       inputs[i].numel()));
    }
  }
  const auto work = begin(type, name, "ccl:_all_gather_base", inputs, opts.timeout);
  Tensors from, to;
  for (size_t i = 0; i < inputs.size(); ++i) {
    from.push_back(to_send(*work, inputs[i]));
    to.push_back(to_receive(*work, outputs[i]));
  }
  work->set_outputs(outputs);
  std::vector<Collective> collectives;
  for (size_t i = 0; i < from.size(); ++i) {
    collectives.push_back(gathering(split_buffer(to[i], std::vector<int64_t>(getSize(), from[i].numel())), from[i]));
  }
  return run(work, opts.asyncOp, collectives);
}

}  // namespace cpulaunch
