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

struct Invalid;  // buffers.hpp

class ProcessGroupCCL final : public c10d::Backend {
 public:
  // Makes a gloo group of the same ranks: for sparse reductions, which all ranks call, and where oneCCL carries the
  // collectives also for messages and bitwise reductions.
  using MakeGloo = std::function<c10::intrusive_ptr<c10d::Backend>()>;

  // Makes what carries the collectives, which may be waiting for the other ranks.
  using Carrier = std::shared_ptr<cl_carrier>;

  using Work = c10d::Work;
  using Tensors = std::vector<at::Tensor>;
  template <class T>
  using Ptr = c10::intrusive_ptr<T>;

  // `in_ledger` is how the ledger has the members' numbers, `pace` is how it waits.  Throws DistBackendError
  // when the ranks do not meet within `timeout`.
  ProcessGroupCCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout, std::string name,
                  Members members, const std::string& in_ledger, Pace pace, std::vector<Peer> local_peers,
                  Heartbeat heartbeat, StoreIntervals intervals, Carrier carrier, MakeGloo make_gloo);
  ~ProcessGroupCCL() override;

  const std::string getBackendName() const override { return "ccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() { return options_; }  // this and the next virtual since 2.9
  void setTimeout(Milliseconds timeout);
  void setSequenceNumberForGroup() override {}  // counted from 0 in every rank
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override;
  // Throws DistBackendError as check_calls(); the group is closed all the same.
  void shutdown() override;
  c10d::ErrorType getError() override;

  // Throws DistBackendError, and fails the group in all ranks, where it is known that they have called different
  // collectives, though none of this rank's has failed.
  void check_calls();
  // The same for each group of this process that is not closed.
  static void check_all_calls();
  // Waits, for each group that is not closed, until the other ranks have got what this one has sent.
  static void leave_all();

  // Whether ranks reduce a tensor without copying it where it lies in shared memory (shared_blocks.hpp).
  bool shares_memory() const;
  // Moves a tensor's storage, and so all tensors on it, to memory that the other ranks of this host may map.  False
  // where there is none to be had; nothing is moved then.
  static bool share_memory(const at::Tensor& tensor);
  // A tensor in such memory, as FSDP2 asks for it.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return shares_memory(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // What is called between the two starts at once; the work that endCoalescing() returns waits for all of it.
  bool supportsCoalescing() const override {
    return transport_ && transport_->abilities.messages && transport_->abilities.bitwise;
  }
  void startCoalescing() override;
  Ptr<Work> endCoalescing() override;

  // `hook` gets each operation that completes, before who waits for that goes on.
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { finish(); }
  void enableCollectivesTiming() override {}  // all are timed

  // collective_allreduce.cpp
  Ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  // Starts the average over all ranks, in place, whose float32 numbers go between hosts as bfloat16 where the transport
  // can do that.
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
  // An operation that all ranks call, or a message.
  Ptr<CclWork> begin(c10d::OpType type, const char* name, const char* profiling_title, Tensors inputs,
                     Milliseconds timeout);
  Ptr<CclWork> begin_message(c10d::OpType type, const char* name, const char* profiling_title, Tensors inputs,
                             int peer);
  Ptr<CclWork> make_work(c10d::OpType type, const char* name, const char* profiling_title, Tensors inputs,
                         Milliseconds timeout, std::atomic<uint64_t>& sequence, int peer);
  // Starts the operation, which is done when all of these are.
  Ptr<Work> run(const Ptr<CclWork>& work, bool asynchronous, const Collective* collectives, size_t count = 1);
  Ptr<Work> run_unrecorded(const Ptr<CclWork>& work, bool asynchronous, const Collective* collectives, size_t count);
  Ptr<Work> run(const Ptr<CclWork>& work, bool asynchronous, const std::vector<Collective>& collectives) {
    return run(work, asynchronous, collectives.data(), collectives.size());
  }

  c10d::Backend& gloo();
  Ptr<Work> receive(const char* name, Tensors& tensors, int from, int tag);
  // Whether the reduction goes through gloo.
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

  // Throws where the group was destroyed, or is another process's.
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
  std::mutex starting_;  // all ranks start their collectives in the same order; so one thread at a time starts some
  std::optional<std::vector<Ptr<CclWork>>> coalesced_;  // those that have started since startCoalescing()
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> messages_{0};  // sent and received
};

}  // namespace cpulaunch
