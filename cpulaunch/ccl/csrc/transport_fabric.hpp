// The hierarchy of cpulaunch's own transport with oneCCL between the hosts.

#pragma once

#include <map>

#include "transport_oneccl.hpp"
#include "transport_own.hpp"

namespace cpulaunch {

// Each lane is a communicator, and so are all ranks.
class OneCclFabric final : public Fabric {
 public:
  // Connects the ranks through `store`.  Throws as connect_oneccl().
  OneCclFabric(const c10::intrusive_ptr<c10d::Store>& store, const Layout& layout);

  Result reduce(int lane, char* data, size_t bytes, NumberType type, Reduction reduction) override;
  Result broadcast(int lane, char* data, size_t bytes, int host) override;
  Result gather(int lane, const char* from, char* to, const Sizes& sizes) override;
  Result exchange(int lane, const char* from, const Sizes& sent, char* to, const Sizes& received) override;
  Result exchange_all(const std::vector<Part>& sent, const std::vector<Part>& received) override;
  // Nothing is in flight.
  void close();

 private:
  std::vector<Part> only(std::vector<Part> parts, bool behind) const;

  const int host_, hosts_;
  const std::vector<int> host_numbers_;  // of each rank
  std::unique_ptr<ccl::communicator> all_;
  std::map<int, std::unique_ptr<ccl::communicator>> lanes_;  // of this rank
};

class FabricTransport final : public OwnTransport {
 public:
  // `slots` may be null where this rank is alone on its host.  Throws as connect_oneccl().
  FabricTransport(const c10::intrusive_ptr<c10d::Store>& store, const Layout& layout,
                  std::shared_ptr<SharedSlots> slots)
      : FabricTransport(layout, std::move(slots), std::make_shared<OneCclFabric>(store, layout)) {}

  void check_reduction(c10::ScalarType type, Op op) const override;
  bool reduces_bitwise() const override { return false; }
  bool scatters_bitwise() const override { return true; }  // oneCCL only moves what the ranks reduce
  int compressing_hosts() const override { return 0; }
  bool has_messages() const override { return false; }
  void close(bool in_flight) override;

 private:
  FabricTransport(const Layout& layout, std::shared_ptr<SharedSlots> slots, std::shared_ptr<OneCclFabric> fabric)
      : OwnTransport(std::make_shared<Hierarchy>(layout, std::move(slots), nullptr, fabric), nullptr),
        fabric_(std::move(fabric)) {}

  std::shared_ptr<OneCclFabric> fabric_;
};

}  // namespace cpulaunch
