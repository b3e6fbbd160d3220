// oneCCL as a transport, with shared memory for reductions: the ranks of a host reduce among themselves what oneCCL
// then reduces between the hosts.

#pragma once

#include <map>

#include "transport_oneccl.hpp"
#include "transport_own.hpp"

namespace cpulaunch {

// oneCCL as the fabric of a hierarchy.  Each lane is a communicator.
class OneCclFabric final : public Fabric {
 public:
  // Connects this rank's lanes through `store`.  Throws as connect_oneccl().
  OneCclFabric(const c10::intrusive_ptr<c10d::Store>& store, const Layout& layout);

  std::unique_ptr<Transfer> reduce(int lane, char* data, size_t bytes, NumberType type, Reduction reduction) override;
  // Nothing is in flight.
  void close();

 private:
  std::map<int, std::unique_ptr<ccl::communicator>> lanes_;  // of this rank
};

// all_reduce and reduce go through the hierarchy, everything else is oneCCL's alone.
class FabricTransport final : public OneCclTransport {
 public:
  // `slots` may be null where this rank is alone on its host.  Throws as connect_oneccl().
  FabricTransport(const c10::intrusive_ptr<c10d::Store>& store, const Layout& layout,
                  std::shared_ptr<SharedSlots> slots);

  Result all_reduce(CclWork& work, const at::Tensor& data, Op op, Wire) override {
    return sums_.all_reduce(work, data, op, Wire::exact);
  }
  Result reduce(CclWork& work, const at::Tensor& from, const at::Tensor& to, Op op, int root) override {
    return sums_.reduce(work, from, to, op, root);
  }
  bool shares_memory() const override { return sums_.shares_memory(); }
  void close(bool in_flight) override;

 private:
  std::shared_ptr<OneCclFabric> fabric_;
  OwnTransport sums_;
};

}  // namespace cpulaunch
