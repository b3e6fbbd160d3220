// oneCCL for all collectives, or between the hosts only.

#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "communicator.hpp"
#include "fabric.hpp"
#include "transport.hpp"

namespace cpulaunch {

class OneCclTransport final : public Transport {
 public:
  // Throws as connect_oneccl().
  OneCclTransport(const cl_store& store, int rank, int size)
      : Transport({}), rank_(rank), size_(size), communicator_(connect_oneccl(store, "", rank, size)) {}

  std::unique_ptr<Transfer> start(const Collective& collective) override;
  void close(bool in_flight) override { disconnect_oneccl(std::move(communicator_), in_flight); }

 private:
  std::unique_ptr<Transfer> reduce(const Collective& its, const Part& from, const Part& to, int root);
  std::unique_ptr<Transfer> reduce_scatter(const Collective& its);
  std::unique_ptr<Transfer> gather_all(const Collective& its);
  std::unique_ptr<Transfer> exchange(Parts sent, Parts received);
  // Divides what has come there, if the reduction is an average.
  std::unique_ptr<Transfer> divided(const Collective& its, const Part& to, std::unique_ptr<Transfer> transfer) const;
  Parts only(const Part& part, int rank) const;
  Parts or_none(const Parts& parts) const { return parts.empty() ? Parts(size_) : parts; }

  const int rank_, size_;
  std::unique_ptr<ccl::communicator> communicator_;
};

// Each lane is a communicator, and so are all ranks.
class OneCclFabric final : public Fabric {
 public:
  // Connects the ranks.  Throws as connect_oneccl().
  OneCclFabric(const cl_store& store, const cl_layout_facts& layout);

  Result reduce(int lane, char* data, size_t bytes, NumberType type, Reduction reduction) override;
  Result broadcast(int lane, char* data, size_t bytes, int host) override;
  Result gather(int lane, const char* from, char* to, const Sizes& sizes) override;
  Result exchange(int lane, const char* from, const Sizes& sent, char* to, const Sizes& received) override;
  Result exchange_all(const Parts& sent, const Parts& received) override;
  void close() override;

 private:
  Parts only(Parts parts, bool behind) const;

  const int host_, hosts_;
  const std::vector<int> host_numbers_;  // of each rank
  std::unique_ptr<ccl::communicator> all_;
  std::map<int, std::unique_ptr<ccl::communicator>> lanes_;  // of this rank
};

// What all ranks have for each other, by an alltoallv.
std::unique_ptr<Transfer> start_exchange(Parts sent, Parts received, const ccl::communicator& communicator);

}  // namespace cpulaunch
