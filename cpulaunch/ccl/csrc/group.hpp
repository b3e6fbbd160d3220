// The process group `ccl`: torch's collectives on host tensors, over oneCCL.

#pragma once

#include "engine.hpp"
#include "hostsum.hpp"
#include "oneccl.hpp"
#include "sentinel.hpp"

namespace cpulaunch {

class ProcessGroupCCL final : public c10d::Backend {
 public:
  // `companion` is a gloo group of the same ranks, for what oneCCL does not have on the host: point to
  // point, bitwise and sparse reductions, monitored barriers.  It is made together with this group: a
  // rank that takes no part in a send would never come to help make it later.
  // `host_sum` is null where this rank shares no memory with the others, and is used if all have one.
  // Throws DistBackendError when the ranks do not meet within `timeout`.
  ProcessGroupCCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout,
                  std::string name, std::vector<Peer> local_peers, Heartbeat heartbeat,
                  std::shared_ptr<HostSum> host_sum, c10::intrusive_ptr<c10d::Backend> companion);
  ~ProcessGroupCCL() override;

  const std::string getBackendName() const override { return "ccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() { return options_; }  // this and the next virtual since 2.9
  void setTimeout(Milliseconds timeout);
  void setSequenceNumberForGroup() override {}  // counted from 0 in every rank
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override;
  void shutdown() override { close(); }
  c10d::ErrorType getError() override;

  using Work = c10d::Work;
  using Tensors = std::vector<at::Tensor>;
  template <class T>
  using Ptr = c10::intrusive_ptr<T>;

  Ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  Ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  Ptr<Work> allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override;
  Ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  Ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override;
  Ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  Ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  Ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts) override;
  Ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts) override;
  Ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override;
  Ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  Ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  Ptr<Work> barrier(const c10d::BarrierOptions& opts) override;

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  Ptr<Work> send(Tensors& tensors, int to, int tag) override { return companion_->send(tensors, to, tag); }
  Ptr<Work> recv(Tensors& tensors, int from, int tag) override { return companion_->recv(tensors, from, tag); }
  Ptr<Work> recvAnysource(Tensors& tensors, int tag) override { return companion_->recvAnysource(tensors, tag); }

 private:
  using Events = std::vector<ccl::event>;

  Ptr<Operation> begin(c10d::OpType type, const char* name, const char* title, Tensors inputs, Milliseconds timeout);
  // Enters oneCCL with `submit`, which returns the events to wait for.
  template <class Submit>
  Ptr<Work> run(const Ptr<Operation>& operation, bool asynchronous, Submit submit);

  Ptr<Work> allreduce_each(const Ptr<Operation>& operation, Tensors& tensors, const c10d::AllreduceOptions& opts);
  Ptr<Work> allgather_coalesced_as(c10d::OpType type, const char* name, std::vector<Tensors>& outputs,
                                   Tensors& inputs, const c10d::AllgatherOptions& opts);
  Ptr<Work> allgather_into_as(c10d::OpType type, const char* name, Tensors& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts);
  Ptr<Work> reduce_scatter_into(c10d::OpType type, const char* name, Tensors& outputs, Tensors& inputs,
                                const c10d::ReduceScatterOptions& opts);
  void submit_allgather(const at::Tensor& output, const std::vector<int64_t>& counts, const at::Tensor& input,
                        Events& events);
  void submit_alltoall(const at::Tensor& output, const std::vector<int64_t>& received, const at::Tensor& input,
                       const std::vector<int64_t>& sent, Events& events);

  void connect(const c10::intrusive_ptr<c10d::Store>& store);
  void close();

  const std::shared_ptr<GroupState> state_;
  const Ptr<Options> options_;
  const Ptr<c10d::Backend> companion_;
  std::shared_ptr<HostSum> host_sum_;
  Milliseconds timeout_;
  std::unique_ptr<ccl::communicator> communicator_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace cpulaunch
