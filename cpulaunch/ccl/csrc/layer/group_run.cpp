// Starts operations of the group, alone or coalesced, and records them for torch's profiler.

#include <algorithm>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "coalesced_work.hpp"
#include "group.hpp"

namespace cpulaunch {

using c10d::OpType;

namespace {

size_t bytes_of(const Parts& parts) {
  size_t bytes = 0;
  for (const auto& part : parts) bytes += part.bytes;
  return bytes;
}

// The element type and the sizes in a profiler event `record_param_comms`.
struct EventSizes {
  EventSizes(const CclWork& work, const Collective* collectives, size_t count) {
    const auto tensors = work.tensors();
    if (!tensors.empty()) type = tensors[0].scalar_type();
    if (work.retrieveOpType() == OpType::BARRIER) return;
    const auto size = static_cast<int64_t>(c10::elementSize(type));
    for (size_t i = 0; i < count; ++i) {
      const auto &sent = collectives[i].sent, &received = collectives[i].received;
      const auto in = bytes_of(sent.empty() ? received : sent) / size;
      const bool is_sent = collectives[i].kind == Kind::send;
      numbers_in += in;
      numbers_out += is_sent ? in : bytes_of(received) / size;
      if (work.retrieveOpType() != OpType::ALLTOALL_BASE) continue;
      for (const auto& part : sent) parts_in.push_back(part.bytes / size);
      for (const auto& part : received) parts_out.push_back(part.bytes / size);
    }
  }

  at::ScalarType type = at::kByte;
  int64_t numbers_in = 0, numbers_out = 0;
  std::vector<int64_t> parts_in, parts_out;
};

// The operations' names in ProcessGroupNCCL, because tools that read traces expect these.
const char* name_in_trace(OpType type, Kind kind) {
  switch (type) {
    case OpType::ALLREDUCE: return "allreduce";
    case OpType::ALLREDUCE_COALESCED: return "allreduce_coalesced";
    case OpType::BROADCAST: return "broadcast";
    case OpType::REDUCE: return "reduce";
    case OpType::ALLGATHER: return "all_gather";
    case OpType::ALLGATHER_COALESCED: return "all_gather_coalesced";
    case OpType::_ALLGATHER_BASE: return "_allgather_base";
    case OpType::REDUCE_SCATTER: return "reduce_scatter";
    case OpType::_REDUCE_SCATTER_BASE: return "_reduce_scatter_base";
    case OpType::ALLTOALL: return "all_to_all";
    case OpType::ALLTOALL_BASE: return "all_to_allv";
    case OpType::GATHER: return "gather";
    case OpType::SCATTER: return "scatter";
    case OpType::BARRIER: return "barrier";
    case OpType::SEND: return "send";
    case OpType::RECV: return "recv";
    case OpType::COALESCED:
      return kind == Kind::all_gather ? "allgather_into_tensor_coalesced" : "reduce_scatter_tensor_coalesced";
    default: return "unknown";
  }
}

}  // namespace

ProcessGroupCCL::Ptr<CclWork> ProcessGroupCCL::begin(c10d::OpType type, const char* name, const char* profiling_title,
                                                     Tensors inputs, Milliseconds timeout) {
  return make_work(type, name, profiling_title, std::move(inputs), timeout, sequence_, /*peer=*/-1);
}

ProcessGroupCCL::Ptr<CclWork> ProcessGroupCCL::begin_message(c10d::OpType type, const char* name,
                                                             const char* profiling_title, Tensors inputs,
                                                             int peer) {
  return make_work(type, name, profiling_title, std::move(inputs), kNoTimeout, messages_, peer);
}

ProcessGroupCCL::Ptr<CclWork> ProcessGroupCCL::make_work(c10d::OpType type, const char* name,
                                                         const char* profiling_title, Tensors inputs,
                                                         Milliseconds timeout, std::atomic<uint64_t>& sequence,
                                                         int peer) {
  if (state_->failed()) {
    throw_for(state_->cause(), c10::str(name, ": group '", state_->name, "' cannot be used any more: ",
                                        state_->reason()));
  }
  static_cast<void>(transport(name));
  const auto limit = timeout > kNoTimeout ? timeout : timeout_;
  return c10::make_intrusive<CclWork>(state_, type, name, profiling_title, std::move(inputs), sequence++, limit,
                                       peer);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::run(const Ptr<CclWork>& work, bool asynchronous,
                                                      const Collective* collectives, size_t count) {
  if (count == 0 || !at::hasCallbacks()) return run_unrecorded(work, asynchronous, collectives, count);
  const auto type = work->retrieveOpType();
  const int root = collectives[0].root < 0 ? getRank() : collectives[0].root;
  const EventSizes sizes(*work, collectives, count);
  const auto& members = state_->members;
  const int first = members.number_of(0), stride = getSize() > 1 ? members.number_of(1) - first : 1;
  RECORD_PARAM_COMMS_DATA(std::make_tuple(static_cast<int64_t>(work->getSequencenumber()) + 1, work->is_message()),
                          std::make_tuple(getGroupUid(), getGroupDesc()), work->tensors(), work->result(), root,
                          name_in_trace(type, collectives[0].kind), sizes.numbers_in, sizes.numbers_out, sizes.type,
                          sizes.parts_in, sizes.parts_out, first, stride, getSize());
  return run_unrecorded(work, asynchronous, collectives, count);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::run_unrecorded(const Ptr<CclWork>& work, bool asynchronous,
                                                                 const Collective* collectives, size_t count) {
  const ProgressEngine::Visit visit(ProgressEngine::instance(), work->is_message());
  auto transfer = std::make_unique<CombinedTransfer>();
  auto& transfers = *transfer;
  work->started(std::move(transfer));
  bool is_coalesced = false;
  try {
    std::lock_guard<std::mutex> lock(starting_);
    ++state_->in_flight;
    for (size_t i = 0; i < count; ++i) transfers.add(transport_->start(collectives[i]));
    // If an exception leaves a batch, the program never ends the batch.  It then waits for its next operations one by
    // one.
    const auto waited_for = [](const auto& each) { return each->was_waited_for(); };
    if (coalesced_ && std::any_of(coalesced_->begin(), coalesced_->end(), waited_for)) coalesced_.reset();
    is_coalesced = coalesced_.has_value();
    if (is_coalesced) coalesced_->push_back(work);
  } catch (const std::exception& error) {
    // Collectives of its other tensors may already be in flight, so the whole operation fails.
    work->fail(c10::str("could not be started: ", error.what()), Cause(CauseKind::transport_failed));
    work->wait();  // throws the error
  }
  if (is_coalesced) {
    ProgressEngine::instance().watch(work);  // the program may never call endCoalescing()
  } else {
    ProgressEngine::instance().run(work, asynchronous);
  }
  return work;
}

// Coalesced operations start one after the other, as without coalescing.  The difference is that the calling thread
// drives none of them until the program waits for all of them.
void ProcessGroupCCL::startCoalescing() {
  TORCH_CHECK(supportsCoalescing(), "ccl: gloo carries some operations of group '", state_->name,
              "', which can't be coalesced");
  std::lock_guard<std::mutex> lock(starting_);
  if (!coalesced_) coalesced_.emplace();
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::endCoalescing() {
  std::vector<Ptr<CclWork>> works;
  {
    std::lock_guard<std::mutex> lock(starting_);
    TORCH_CHECK(coalesced_, "ccl: group '", state_->name, "' coalesces nothing");
    works = std::move(*coalesced_);
    coalesced_.reset();
  }
  return c10::make_intrusive<CoalescedWork>(getRank(), std::move(works));
}

}  // namespace cpulaunch
