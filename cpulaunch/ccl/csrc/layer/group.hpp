// The process group `ccl`: torch's collectives on host tensors.

#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "interface.h"
#include "progress.hpp"
#include "transport.hpp"
#include "watchdog.hpp"

namespace cpulaunch {

struct Invalid;  // in buffers.hpp

class ProcessGroupCCL final : public c10d::Backend {
 public:
  // Makes a gloo group of the same ranks.  That group carries sparse reductions and, if oneCCL carries the collectives,
  // also messages and bitwise reductions.
  using MakeGloo = std::function<c10::intrusive_ptr<c10d::Backend>()>;

  // Makes the transport.  This may wait for the other ranks.
  using Carrier = std::shared_ptr<cl_carrier>;

  using Work = c10d::Work;
  using Tensors = std::vector<at::Tensor>;
  template <class T>
  using Ptr = c10::intrusive_ptr<T>;

  // `in_ledger` is the text in which the ledger lists the members, and `pace` says how waiting threads poll.  Throws
  // DistBackendError if the ranks do not meet within `timeout`.
  ProcessGroupCCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout, std::string name,
                  Members members, const std::string& in_ledger, Pace pace, std::vector<Peer> local_peers,
                  Heartbeat heartbeat, StoreIntervals intervals, Carrier carrier, MakeGloo make_gloo);
  ~ProcessGroupCCL() override;

  const std::string getBackendName() const override { return "ccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() { return options_; }  // this and the next: virtual since torch 2.9
  void setTimeout(Milliseconds timeout);
  void setSequenceNumberForGroup() override {}  // all ranks count from 0
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override;
  // Closes the group even if check_calls() throws DistBackendError, which is passed on.
  void shutdown() override;
  c10d::ErrorType getError() override;

  // Finds ranks that have called different collectives although none of this rank's operations has failed.  Then fails
  // the group in all ranks and throws DistBackendError.
  void check_calls();
  // Calls check_calls() of each open group of this process.
  static void check_all_calls();
  // For each open group of this process, waits until the other ranks have received what this one has sent.
  static void leave_all();

  // Whether the ranks of a host reduce tensors in shared memory (shared_blocks.hpp) without copying them.
  bool shares_memory() const;
  // Moves a tensor's storage, and so all tensors that use it, to memory that the other ranks of this host may map.
  // Returns false and moves nothing if that memory isn't available.
  static bool share_memory(const at::Tensor& tensor);
  // Allocates a tensor in that memory, for FSDP2.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return shares_memory(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // Operations between startCoalescing() and endCoalescing() start at once.  The work that endCoalescing() returns
  // waits for all of them.
  bool supportsCoalescing() const override {
    return transport_ && transport_->abilities.messages && transport_->abilities.bitwise;
  }
  void startCoalescing() override;
  Ptr<Work> endCoalescing() override;

  // Sets a hook that is called for each operation that completes, before threads that wait for the operation continue.
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { finish(); }
  void enableCollectivesTiming() override {}  // always on

  // collective_allreduce.cpp
  Ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  // Starts the average over all ranks, in place.  float32 numbers travel between hosts as bfloat16 if the transport
  // supports it.
  Ptr<Work> average_compressed(const at::Tensor& tensor);
  int compressing_hosts() const { return transport("compressing_hosts").abilities.compressing_hosts; }

  // collective_broadcast.cpp
  Ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Ptr<Work> barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // collective_allgather.cpp
  Ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  Ptr<Work> allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override;
  Ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  Ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override;

  // collective_reduce_scatter.cpp
  Ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts) override;
  Ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts) override;
  Ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override;

  // collective_alltoall.cpp
  Ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  Ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  Ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  Ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;

  // collective_send.cpp
  Ptr<Work> send(Tensors& tensors, int to, int tag) override;
  Ptr<Work> recv(Tensors& tensors, int from, int tag) override;
  Ptr<Work> recvAnysource(Tensors& tensors, int tag) override;

 private:
  // begin() is for operations that all ranks call, begin_message() for messages.
  Ptr<CclWork> begin(c10d::OpType type, const char* name, const char* profiling_title, Tensors inputs,
                     Milliseconds timeout);
  Ptr<CclWork> begin_message(c10d::OpType type, const char* name, const char* profiling_title, Tensors inputs,
                             int peer);
  Ptr<CclWork> make_work(c10d::OpType type, const char* name, const char* profiling_title, Tensors inputs,
                         Milliseconds timeout, std::atomic<uint64_t>& sequence, int peer);
  // Starts the operation, which is done when all of its collectives are done.
  Ptr<Work> run(const Ptr<CclWork>& work, bool asynchronous, const Collective* collectives, size_t count = 1);
  Ptr<Work> run_unrecorded(const Ptr<CclWork>& work, bool asynchronous, const Collective* collectives, size_t count);
  Ptr<Work> run(const Ptr<CclWork>& work, bool asynchronous, const std::vector<Collective>& collectives) {
    return run(work, asynchronous, collectives.data(), collectives.size());
  }

  c10d::Backend& gloo();
  Ptr<Work> receive(const char* name, Tensors& tensors, int from, int tag);
  // Whether the transport lacks this reduction; gloo carries it then.
  bool lacks(const c10d::ReduceOp& op) const;
  Ptr<Work> allreduce_each(c10d::OpType type, const char* name, Tensors& tensors,
                           const c10d::AllreduceOptions& opts, Wire wire = Wire::exact);
  Ptr<Work> allgather_lists(c10d::OpType type, const char* name, std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& opts);
  Ptr<Work> allgather_tensors(c10d::OpType type, const char* name, Tensors& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts);
  void check_scattered(const Invalid& invalid, const at::Tensor& output, const c10d::ReduceOp& op) const;
  Ptr<Work> reduce_scatter_tensors(c10d::OpType type, const char* name, Tensors& outputs, Tensors& inputs,
                                   const c10d::ReduceScatterOptions& opts);

  // Throws if the group was destroyed, or if this process was forked from the one that made the group.
  Transport& transport(const char* operation) const;
  void connect(Carrier carrier);
  void finish();
  void close();

  const std::shared_ptr<GroupState> state_;
  const Ptr<c10d::Store> store_;
  std::atomic<uint64_t> monitored_barriers_{0};
  const Ptr<Options> options_;
  const MakeGloo make_gloo_;
  std::once_flag gloo_made_;
  Ptr<c10d::Backend> gloo_fallback_;  // null until it is needed
  Milliseconds timeout_;
  std::unique_ptr<Transport> transport_;  // null once the group is closed
  std::mutex starting_;  // one thread at a time starts collectives, because all ranks must start them in the same order
  std::optional<std::vector<Ptr<CclWork>>> coalesced_;  // the operations since startCoalescing()
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> messages_{0};  // number of messages sent and received
};

}  // namespace cpulaunch
