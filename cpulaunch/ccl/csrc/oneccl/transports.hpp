// The transport that uses oneCCL for all collectives.

#pragma once

#include <vector>

#include "communicator.hpp"
#include "transport.hpp"

namespace cpulaunch {

class OneCclTransport final : public Transport {
 public:
  // Throws like connect_oneccl().
  OneCclTransport(const cl_store& store, int rank, int size)
      : Transport({}), rank_(rank), size_(size), communicator_(connect_oneccl(store, rank, size)) {}

  std::unique_ptr<Transfer> start(const Collective& collective) override;
  void close(bool in_flight) override { disconnect_oneccl(std::move(communicator_), in_flight); }

 private:
  std::unique_ptr<Transfer> reduce(const Collective& its, const Part& from, const Part& to, int root);
  std::unique_ptr<Transfer> reduce_scatter(const Collective& its);
  std::unique_ptr<Transfer> gather_all(const Collective& its);
  std::unique_ptr<Transfer> exchange(Parts sent, Parts received);
  // Divides the received sums once the transfer is done, if the reduction is an average.
  std::unique_ptr<Transfer> divided(const Collective& its, const Part& to, std::unique_ptr<Transfer> transfer) const;
  Parts only(const Part& part, int rank) const;
  Parts or_none(const Parts& parts) const { return parts.empty() ? Parts(size_) : parts; }

  const int rank_, size_;
  std::unique_ptr<ccl::communicator> communicator_;
};

}  // namespace cpulaunch
