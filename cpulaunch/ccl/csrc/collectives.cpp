// torch's collectives in terms of oneCCL's.

#include "buffers.hpp"
#include "group.hpp"

namespace cpulaunch {

namespace {

using c10d::OpType;
using c10d::ReduceOp;

bool is_bitwise(const ReduceOp& op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

at::Tensor& single(std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "ccl: expected one tensor, got ", tensors.size());
  return tensors[0];
}

void check_root(int64_t root, int size) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, "ccl: root rank ", root, " is not in a group of ", size);
}

void check_same_type(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "ccl: tensors of one operation must have one type, not ",
                   a.scalar_type(), " and ", b.scalar_type());
}

// Before a PREMUL_SUM ...
void scale_before(const ReduceOp& op, at::Tensor& data) {
  if (op != ReduceOp::PREMUL_SUM) return;
  const auto* supplement = reinterpret_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement, "ccl: PREMUL_SUM without its factor");
  if (supplement->tensor_factor.defined()) {
    data.mul_(supplement->tensor_factor);
  } else {
    data.mul_(supplement->double_factor);
  }
}

// ... and after an average.
void scale_after(Operation& operation, const ReduceOp& op, at::Tensor data, int size) {
  if (op != ReduceOp::AVG) return;
  if (at::isIntegralType(data.scalar_type(), /*includeBool=*/false)) {
    operation.afterwards([data, size]() mutable { data.div_(size, "trunc"); });
  } else {
    operation.afterwards([data, size]() mutable { data.div_(size); });
  }
}

// The number of elements that go to, or come from, each rank, for a tensor split along its first dimension.
std::vector<int64_t> split_counts(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  const int64_t row = rows > 0 ? tensor.numel() / rows : 0;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(tensor.dim() > 0 && rows % size == 0, "ccl: the first dimension of a tensor of shape ",
                      tensor.sizes(), " is not divisible by the group's size, ", size);
    return std::vector<int64_t>(size, rows / size * row);
  }
  TORCH_CHECK_VALUE(static_cast<int>(splits.size()) == size, "ccl: ", splits.size(), " splits for a group of ", size);
  std::vector<int64_t> counts;
  int64_t total = 0;
  for (const auto split : splits) {
    counts.push_back(split * row);
    total += split;
  }
  TORCH_CHECK_VALUE(total == rows, "ccl: the splits add up to ", total, ", not to the first dimension of ",
                    tensor.sizes());
  return counts;
}

std::vector<int64_t> counts_of(const std::vector<at::Tensor>& parts) {
  std::vector<int64_t> counts;
  for (const auto& part : parts) counts.push_back(part.numel());
  return counts;
}

// oneCCL's all-to-all takes one buffer with the ranks' parts side by side.
at::Tensor join_to_send(Operation& operation, const std::vector<at::Tensor>& parts) {
  std::vector<at::Tensor> flat;
  for (const auto& part : parts) {
    check_tensor(part);
    check_same_type(part, parts[0]);
    flat.push_back(part.resolve_conj().resolve_neg().reshape({-1}));
  }
  auto joined = at::cat(flat);
  operation.keep(joined);
  return joined;
}

at::Tensor join_to_receive(Operation& operation, const std::vector<at::Tensor>& parts) {
  int64_t total = 0;
  for (const auto& part : parts) {
    check_tensor(part);
    check_same_type(part, parts[0]);
    total += part.numel();
  }
  auto joined = at::empty({total}, parts[0].options());
  operation.keep(joined);
  operation.afterwards([parts, joined] {
    int64_t offset = 0;
    for (auto part : parts) {
      part.copy_(joined.narrow(0, offset, part.numel()).view(part.sizes()));
      offset += part.numel();
    }
  });
  return joined;
}

}  // namespace

template <class Submit>
ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::run(const Ptr<Operation>& operation, bool asynchronous,
                                                      Submit submit) {
  Events events;
  try {
    auto inside = Engine::instance().enter();
    ++state_->in_flight;
    submit(events);
    operation->started(std::move(events));
  } catch (const std::exception& error) {
    operation->fail(c10::str("could not be started: ", error.what()));  // its other tensors may be under way
    operation->wait();  // which throws that
  }
  Engine::instance().run(operation, asynchronous);
  return operation;
}

// --- allreduce, reduce, broadcast, barrier

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  auto& tensor = single(tensors);
  if (tensor.is_sparse() || is_bitwise(opts.reduceOp)) return companion_->allreduce(tensors, opts);
  const auto operation = begin(OpType::ALLREDUCE, "all_reduce", "ccl:all_reduce", tensors, opts.timeout);
  return allreduce_each(operation, tensors, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  if (is_bitwise(opts.reduceOp)) return companion_->allreduce_coalesced(tensors, opts);
  const auto operation =
      begin(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", "ccl:all_reduce", tensors, opts.timeout);
  return allreduce_each(operation, tensors, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allreduce_each(const Ptr<Operation>& operation, Tensors& tensors,
                                                                 const c10d::AllreduceOptions& opts) {
  Tensors data;
  for (const auto& tensor : tensors) {
    check_tensor(tensor);
    reduction_of(opts.reduceOp, tensor.scalar_type());  // so that nothing has started when one does not fit
    cells_to_reduce(tensor, opts.reduceOp);
    data.push_back(to_exchange(*operation, tensor));
    scale_before(opts.reduceOp, data.back());
    scale_after(*operation, opts.reduceOp, tensor, getSize());
  }
  operation->set_outputs(tensors);
  return run(operation, opts.asyncOp, [&](Events& events) {
    for (const auto& tensor : data) {
      if (tensor.numel() == 0) continue;
      const auto cells = cells_to_reduce(tensor, opts.reduceOp);
      const auto count = tensor.numel() * cells.per_element;
      const auto reduction = reduction_of(opts.reduceOp, tensor.scalar_type());
      if (host_sum_ && HostSum::takes(cells.type, reduction)) {
        operation->started(host_sum_, host_sum_->add(tensor.data_ptr(), count, cells.type));
      } else {
        events.push_back(ccl::allreduce(tensor.data_ptr(), tensor.data_ptr(), count, cells.type, reduction,
                                        *communicator_));
      }
    }
  });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  auto& tensor = single(tensors);
  check_root(opts.rootRank, getSize());
  if (tensor.is_sparse() || is_bitwise(opts.reduceOp)) return companion_->reduce(tensors, opts);
  const auto operation = begin(OpType::REDUCE, "reduce", "ccl:reduce", tensors, opts.timeout);
  const auto reduction = reduction_of(opts.reduceOp, tensor.scalar_type());
  const auto cells = cells_to_reduce(tensor, opts.reduceOp);
  const bool root = getRank() == opts.rootRank;
  // Only the root's tensor changes.
  auto from = root ? to_exchange(*operation, tensor) : to_send(*operation, tensor);
  if (!root && opts.reduceOp == ReduceOp::PREMUL_SUM) operation->keep(from = from.clone());
  scale_before(opts.reduceOp, from);
  if (root) scale_after(*operation, opts.reduceOp, tensor, getSize());
  const auto to = root ? from : at::empty_like(from);
  operation->keep(to);
  operation->set_outputs(tensors);
  return run(operation, opts.asyncOp, [&](Events& events) {
    if (from.numel() == 0) return;
    events.push_back(ccl::reduce(from.data_ptr(), to.data_ptr(), from.numel() * cells.per_element, cells.type,
                                 reduction, static_cast<int>(opts.rootRank), *communicator_));
  });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  auto& tensor = single(tensors);
  check_root(opts.rootRank, getSize());
  const auto operation = begin(OpType::BROADCAST, "broadcast", "ccl:broadcast", tensors, opts.timeout);
  const auto data = getRank() == opts.rootRank ? to_send(*operation, tensor) : to_receive(*operation, tensor);
  operation->set_outputs(tensors);
  return run(operation, opts.asyncOp, [&](Events& events) {
    if (data.numel() == 0) return;
    const auto cells = cells_to_move(data);
    events.push_back(ccl::broadcast(data.data_ptr(), data.numel() * cells.per_element, cells.type,
                                    static_cast<int>(opts.rootRank), *communicator_));
  });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::barrier(const c10d::BarrierOptions& opts) {
  const auto operation = begin(OpType::BARRIER, "barrier", "ccl:barrier", {}, opts.timeout);
  // Not oneCCL's barrier, which blocks its caller and knows no time limit.
  const auto token = at::zeros({1}, at::kByte);
  operation->keep(token);
  return run(operation, opts.asyncOp, [&](Events& events) {
    events.push_back(ccl::allreduce(token.data_ptr(), token.data_ptr(), 1, ccl::datatype::uint8, ccl::reduction::max,
                                    *communicator_));
  });
}

void ProcessGroupCCL::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  companion_->monitoredBarrier(opts, wait_all_ranks);
}

// --- allgather

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& opts) {
  single(inputs);
  TORCH_CHECK_VALUE(outputs.size() == 1, "ccl: expected one list of outputs, got ", outputs.size());
  return allgather_coalesced_as(OpType::ALLGATHER, "all_gather", outputs, inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                                      const c10d::AllgatherOptions& opts) {
  // torch's order: for each rank a list with one tensor for each input.
  std::vector<Tensors> of_input(inputs.size());
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == getSize(), "ccl: expected ", getSize(), " output lists, got ",
                    outputs.size());
  for (const auto& of_rank : outputs) {
    TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), "ccl: expected ", inputs.size(), " outputs for each rank, got ",
                      of_rank.size());
    for (size_t i = 0; i < inputs.size(); ++i) of_input[i].push_back(of_rank[i]);
  }
  return allgather_coalesced_as(OpType::ALLGATHER_COALESCED, "all_gather_coalesced", of_input, inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allgather_coalesced_as(OpType type, const char* name,
                                                                         std::vector<Tensors>& outputs,
                                                                         Tensors& inputs,
                                                                         const c10d::AllgatherOptions& opts) {
  const auto operation = begin(type, name, "ccl:all_gather", inputs, opts.timeout);
  Tensors sent, received, all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK_VALUE(static_cast<int>(outputs[i].size()) == getSize(), "ccl: expected ", getSize(),
                      " output tensors, got ", outputs[i].size());
    sent.push_back(to_send(*operation, inputs[i]));
    check_same_type(outputs[i][0], inputs[i]);
    received.push_back(join_to_receive(*operation, outputs[i]));
    all.insert(all.end(), outputs[i].begin(), outputs[i].end());
    TORCH_CHECK_VALUE(outputs[i][getRank()].numel() == inputs[i].numel(), "ccl: rank ", getRank(), " sends ",
                      inputs[i].sizes(), " and has room for ", outputs[i][getRank()].sizes());
  }
  operation->set_outputs(std::move(all));
  return run(operation, opts.asyncOp, [&](Events& events) {
    for (size_t i = 0; i < sent.size(); ++i) submit_allgather(received[i], counts_of(outputs[i]), sent[i], events);
  });
}

// `output` is flat and holds the ranks' parts side by side, `counts` are their elements.  oneCCL's allgatherv to a
// list of buffers would block its caller until all ranks have come, where no time limit holds: its algorithms
// `flat` and `multi_bcast` are synchronous, and no other one takes a list.
void ProcessGroupCCL::submit_allgather(const at::Tensor& output, const std::vector<int64_t>& counts,
                                       const at::Tensor& input, Events& events) {
  if (output.numel() == 0) return;
  const auto cells = cells_to_move(input);
  ccl::vector_class<size_t> to;
  for (const auto count : counts) to.push_back(count * cells.per_element);
  events.push_back(
      ccl::allgatherv(input.data_ptr(), to[getRank()], output.data_ptr(), to, cells.type, *communicator_));
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                  const c10d::AllgatherOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_as(OpType::_ALLGATHER_BASE, "all_gather_into_tensor", outputs, inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return allgather_into_as(OpType::COALESCED, "all_gather_into_tensor_coalesced", outputs, inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::allgather_into_as(OpType type, const char* name, Tensors& outputs,
                                                                    Tensors& inputs,
                                                                    const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "ccl: ", outputs.size(), " outputs for ", inputs.size(), " inputs");
  const auto operation = begin(type, name, "ccl:_all_gather_base", inputs, opts.timeout);
  Tensors sent, received;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_same_type(outputs[i], inputs[i]);
    TORCH_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * getSize(), "ccl: the output has ", outputs[i].numel(),
                      " elements, not ", getSize(), " times the input's ", inputs[i].numel());
    sent.push_back(to_send(*operation, inputs[i]));
    received.push_back(to_receive(*operation, outputs[i]));
  }
  operation->set_outputs(outputs);
  return run(operation, opts.asyncOp, [&](Events& events) {
    for (size_t i = 0; i < sent.size(); ++i) {
      submit_allgather(received[i], std::vector<int64_t>(getSize(), sent[i].numel()), sent[i], events);
    }
  });
}

// --- reduce_scatter

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                                 const c10d::ReduceScatterOptions& opts) {
  auto& output = single(outputs);
  TORCH_CHECK_VALUE(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == getSize(), "ccl: expected ", getSize(),
                    " input tensors");
  auto& parts = inputs[0];
  for (const auto& part : parts) check_same_type(part, output);
  TORCH_CHECK_VALUE(parts[getRank()].numel() == output.numel(), "ccl: the output has ", output.numel(),
                    " elements, this rank's input ", parts[getRank()].numel());
  TORCH_CHECK_VALUE(!is_bitwise(opts.reduceOp), "ccl: reduce_scatter has no bitwise reductions");
  const auto operation = begin(OpType::REDUCE_SCATTER, "reduce_scatter", "ccl:reduce_scatter", parts, opts.timeout);
  const auto cells = cells_to_reduce(output, opts.reduceOp);
  const auto reduction = reduction_of(opts.reduceOp, output.scalar_type());
  // One reduction to each rank: the parts may differ in size, and need not lie side by side.
  Tensors from, to;
  for (int rank = 0; rank < getSize(); ++rank) {
    auto part = to_send(*operation, parts[rank]);
    if (opts.reduceOp == ReduceOp::PREMUL_SUM) operation->keep(part = part.clone());
    scale_before(opts.reduceOp, part);
    from.push_back(part);
    to.push_back(rank == getRank() ? to_receive(*operation, output) : at::empty_like(part));
    operation->keep(to.back());
  }
  scale_after(*operation, opts.reduceOp, output, getSize());
  operation->set_outputs(outputs);
  return run(operation, opts.asyncOp, [&](Events& events) {
    for (int rank = 0; rank < getSize(); ++rank) {
      if (from[rank].numel() == 0) continue;
      events.push_back(ccl::reduce(from[rank].data_ptr(), to[rank].data_ptr(),
                                   from[rank].numel() * cells.per_element, cells.type, reduction, rank,
                                   *communicator_));
    }
  });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                       const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_into(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", outputs, inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return reduce_scatter_into(OpType::COALESCED, "reduce_scatter_tensor_coalesced", outputs,
                             inputs, opts);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::reduce_scatter_into(OpType type, const char* name, Tensors& outputs,
                                                                      Tensors& inputs,
                                                                      const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "ccl: ", outputs.size(), " outputs for ", inputs.size(), " inputs");
  TORCH_CHECK_VALUE(!is_bitwise(opts.reduceOp), "ccl: reduce_scatter has no bitwise reductions");
  const auto operation = begin(type, name, "ccl:_reduce_scatter_base", inputs, opts.timeout);
  Tensors from, to;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_same_type(outputs[i], inputs[i]);
    TORCH_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * getSize(), "ccl: the input has ", inputs[i].numel(),
                      " elements, not ", getSize(), " times the output's ", outputs[i].numel());
    cells_to_reduce(inputs[i], opts.reduceOp);
    reduction_of(opts.reduceOp, inputs[i].scalar_type());
    auto data = apart_from(*operation, outputs[i], to_send(*operation, inputs[i]));
    if (opts.reduceOp == ReduceOp::PREMUL_SUM) operation->keep(data = data.clone());
    scale_before(opts.reduceOp, data);
    from.push_back(data);
    to.push_back(to_receive(*operation, outputs[i]));
    scale_after(*operation, opts.reduceOp, outputs[i], getSize());
  }
  operation->set_outputs(outputs);
  return run(operation, opts.asyncOp, [&](Events& events) {
    for (size_t i = 0; i < from.size(); ++i) {
      if (to[i].numel() == 0) continue;
      const auto cells = cells_to_reduce(to[i], opts.reduceOp);
      events.push_back(ccl::reduce_scatter(from[i].data_ptr(), to[i].data_ptr(), to[i].numel() * cells.per_element,
                                           cells.type, reduction_of(opts.reduceOp, to[i].scalar_type()),
                                           *communicator_));
    }
  });
}

// --- all to all, and gather and scatter in terms of it

// `counts` are in elements; both tensors are flat and hold the ranks' parts side by side.
void ProcessGroupCCL::submit_alltoall(const at::Tensor& output, const std::vector<int64_t>& received,
                                      const at::Tensor& input, const std::vector<int64_t>& sent, Events& events) {
  const auto cells = cells_to_move(output);
  ccl::vector_class<size_t> to, from;
  for (const auto count : received) to.push_back(count * cells.per_element);
  for (const auto count : sent) from.push_back(count * cells.per_element);
  events.push_back(ccl::alltoallv(input.data_ptr(), from, output.data_ptr(), to, cells.type, *communicator_));
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::alltoall(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(static_cast<int>(inputs.size()) == getSize() && static_cast<int>(outputs.size()) == getSize(),
                    "ccl: all_to_all takes ", getSize(), " inputs and outputs, not ", inputs.size(), " and ",
                    outputs.size());
  check_same_type(outputs[0], inputs[0]);
  const auto operation = begin(OpType::ALLTOALL, "all_to_all", "ccl:all_to_all", inputs, opts.timeout);
  const auto from = join_to_send(*operation, inputs);
  const auto to = join_to_receive(*operation, outputs);
  operation->set_outputs(outputs);
  return run(operation, opts.asyncOp, [&](Events& events) {
    submit_alltoall(to, counts_of(outputs), from, counts_of(inputs), events);
  });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                                std::vector<int64_t>& output_splits,
                                                                std::vector<int64_t>& input_splits,
                                                                const c10d::AllToAllOptions& opts) {
  check_same_type(output, input);
  const auto received = split_counts(output, output_splits, getSize());
  const auto sent = split_counts(input, input_splits, getSize());
  const auto operation = begin(OpType::ALLTOALL_BASE, "all_to_all_single", "ccl:all_to_all", {input}, opts.timeout);
  const auto from = apart_from(*operation, output, to_send(*operation, input));
  const auto to = to_receive(*operation, output);
  operation->set_outputs({output});
  return run(operation, opts.asyncOp, [&](Events& events) { submit_alltoall(to, received, from, sent, events); });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                         const c10d::GatherOptions& opts) {
  auto& input = single(inputs);
  check_root(opts.rootRank, getSize());
  const bool root = getRank() == opts.rootRank;
  TORCH_CHECK_VALUE(outputs.size() == (root ? 1 : 0), "ccl: gather takes outputs on its root rank, and only there");
  TORCH_CHECK_VALUE(!root || static_cast<int>(outputs[0].size()) == getSize(), "ccl: gather takes ", getSize(),
                    " outputs");
  if (root) check_same_type(outputs[0][0], input);
  const auto operation = begin(OpType::GATHER, "gather", "ccl:gather", inputs, opts.timeout);
  const auto from = to_send(*operation, input);
  const auto to = root ? join_to_receive(*operation, outputs[0]) : at::empty({0}, input.options());
  std::vector<int64_t> sent(getSize(), 0);
  sent[opts.rootRank] = from.numel();
  const auto received = root ? counts_of(outputs[0]) : std::vector<int64_t>(getSize(), 0);
  if (root) operation->set_outputs(outputs[0]);
  return run(operation, opts.asyncOp, [&](Events& events) { submit_alltoall(to, received, from, sent, events); });
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                          const c10d::ScatterOptions& opts) {
  auto& output = single(outputs);
  check_root(opts.rootRank, getSize());
  const bool root = getRank() == opts.rootRank;
  TORCH_CHECK_VALUE(inputs.size() == (root ? 1 : 0), "ccl: scatter takes inputs on its root rank, and only there");
  TORCH_CHECK_VALUE(!root || static_cast<int>(inputs[0].size()) == getSize(), "ccl: scatter takes ", getSize(),
                    " inputs");
  if (root) check_same_type(inputs[0][0], output);
  const auto operation = begin(OpType::SCATTER, "scatter", "ccl:scatter", outputs, opts.timeout);
  const auto from = root ? join_to_send(*operation, inputs[0]) : at::empty({0}, output.options());
  const auto to = to_receive(*operation, output);
  std::vector<int64_t> received(getSize(), 0);
  received[opts.rootRank] = to.numel();
  const auto sent = root ? counts_of(inputs[0]) : std::vector<int64_t>(getSize(), 0);
  operation->set_outputs(outputs);
  return run(operation, opts.asyncOp, [&](Events& events) { submit_alltoall(to, received, from, sent, events); });
}

}  // namespace cpulaunch
