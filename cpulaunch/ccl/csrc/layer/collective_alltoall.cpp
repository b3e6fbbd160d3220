// all_to_all, gather and scatter.

#include "buffers.hpp"
#include "group.hpp"

namespace cpulaunch {

using c10d::OpType;

namespace {

// Returns how many elements are sent to, or received from, each rank if the tensor is split along its first dimension.
std::vector<int64_t> counts_of_splits(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  c10d::checkSplitSizes(splits, tensor, size);
  std::vector<int64_t> lengths(size), offsets(size);
  c10d::computeLengthsAndOffsets(splits, tensor, &lengths, &offsets);
  return lengths;
}

void check_own_part(const Invalid& invalid, int64_t sent, int64_t received) {
  if (sent != received) invalid(c10::str("this rank sends itself ", sent, " elements and receives ", received));
}

}  // namespace

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::alltoall(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllToAllOptions& opts) {
  const Invalid invalid{"all_to_all"};
  c10d::assertNonEmpty(invalid, inputs);
  check_list(invalid, inputs, getSize(), inputs[0]);
  check_list(invalid, outputs, getSize(), inputs[0]);
  check_own_part(invalid, inputs[getRank()].numel(), outputs[getRank()].numel());
  const auto work = begin(OpType::ALLTOALL, "all_to_all", "ccl:all_to_all", inputs, opts.timeout);
  const auto from = to_send(*work, inputs);
  const auto to = to_receive(*work, outputs);
  work->set_outputs(outputs);
  Collective collective{Kind::all_to_all};
  collective.sent = parts_of(from);
  collective.received = parts_of(to);
  return run(work, opts.asyncOp, &collective);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                                std::vector<int64_t>& output_splits,
                                                                std::vector<int64_t>& input_splits,
                                                                const c10d::AllToAllOptions& opts) {
  const Invalid invalid{"all_to_all_single"};
  check_tensor(invalid, input);
  check_tensors(invalid, {output}, input);
  const auto received = counts_of_splits(output, output_splits, getSize());
  const auto sent = counts_of_splits(input, input_splits, getSize());
  check_own_part(invalid, sent[getRank()], received[getRank()]);
  const auto work = begin(OpType::ALLTOALL_BASE, "all_to_all_single", "ccl:all_to_all", {input}, opts.timeout);
  const auto from = apart_from(*work, output, to_send(*work, input));
  const auto to = to_receive(*work, output);
  work->set_outputs({output});
  Collective collective{Kind::all_to_all};
  collective.sent = split_buffer(from, sent);
  collective.received = split_buffer(to, received);
  return run(work, opts.asyncOp, &collective);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                         const c10d::GatherOptions& opts) {
  const Invalid invalid{"gather"};
  const auto& input = single(invalid, inputs);
  check_tensor(invalid, input);
  c10d::assertRootRank(invalid, opts.rootRank, getSize());
  const bool root = getRank() == opts.rootRank;
  if (outputs.size() != (root ? 1 : 0)) invalid("a list of outputs is for the root rank, and only there");
  if (root) check_list(invalid, outputs[0], getSize(), input);
  const auto work = begin(OpType::GATHER, "gather", "ccl:gather", inputs, opts.timeout);
  work->says(static_cast<int>(opts.rootRank));
  const auto from = to_send(*work, input);
  const auto to = root ? to_receive(*work, outputs[0]) : Tensors{};
  if (root) work->set_outputs(outputs[0]);
  Collective collective{Kind::gather};
  collective.root = static_cast<int>(opts.rootRank);
  collective.sent = {part_of(from)};
  collective.received = parts_of(to);
  return run(work, opts.asyncOp, &collective);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                          const c10d::ScatterOptions& opts) {
  const Invalid invalid{"scatter"};
  const auto& output = single(invalid, outputs);
  check_tensor(invalid, output);
  c10d::assertRootRank(invalid, opts.rootRank, getSize());
  const bool root = getRank() == opts.rootRank;
  if (inputs.size() != (root ? 1 : 0)) invalid("a list of inputs is for the root rank, and only there");
  if (root) check_list(invalid, inputs[0], getSize(), output);
  const auto work = begin(OpType::SCATTER, "scatter", "ccl:scatter", outputs, opts.timeout);
  work->says(static_cast<int>(opts.rootRank));
  const auto from = root ? to_send(*work, inputs[0]) : Tensors{};
  const auto to = to_receive(*work, output);
  work->set_outputs(outputs);
  Collective collective{Kind::scatter};
  collective.root = static_cast<int>(opts.rootRank);
  collective.sent = parts_of(from);
  collective.received = {part_of(to)};
  return run(work, opts.asyncOp, &collective);
}

}  // namespace cpulaunch
