#include "transports.hpp"

namespace cpulaunch {

// A lane's ranks wait for each other, one of which may have several lanes.  All connect theirs in ascending order: so
// the ranks of the lowest lane that is not connected are done with all lower ones, and meet.
OneCclFabric::OneCclFabric(const cl_store& store, const cl_layout_facts& layout)
    : host_(layout.host),
      hosts_(layout.hosts),
      host_numbers_(layout.host_numbers, layout.host_numbers + layout.size),
      all_(connect_oneccl(store, "", layout.rank, layout.size)) {
  for (int lane = layout.local; lane < layout.lanes; lane += layout.locals) {
    lanes_[lane] = connect_oneccl(store, "lane/" + std::to_string(lane) + "/", layout.host, layout.hosts);
  }
}

OneCclFabric::Result OneCclFabric::reduce(int lane, char* data, size_t bytes, NumberType type, Reduction reduction) {
  return start_oneccl([&] {
    return ccl::allreduce(data, data, bytes / size_of(type), datatype_of(type), reduction_of(type, reduction),
                          *lanes_.at(lane));
  });
}

OneCclFabric::Result OneCclFabric::broadcast(int lane, char* data, size_t bytes, int host) {
  return start_oneccl([&] { return ccl::broadcast(data, bytes, ccl::datatype::uint8, host, *lanes_.at(lane)); });
}

OneCclFabric::Result OneCclFabric::gather(int lane, const char* from, char* to, const Sizes& sizes) {
  return start_oneccl([&] {
    return ccl::allgatherv(from, sizes[host_], to, sizes, ccl::datatype::uint8, *lanes_.at(lane));
  });
}

OneCclFabric::Result OneCclFabric::exchange(int lane, const char* from, const Sizes& sent, char* to,
                                            const Sizes& received) {
  return start_oneccl(
      [&] { return ccl::alltoallv(from, sent, to, received, ccl::datatype::uint8, *lanes_.at(lane)); });
}

// With more than two hosts in two operations, one for each direction: what goes to the hosts behind this one lies side
// by side in a tensor, where the ranks of a host are neighbours, and so does what goes to those before it.
OneCclFabric::Result OneCclFabric::exchange_all(const Parts& sent, const Parts& received) {
  if (hosts_ == 2) return start_exchange(sent, received, *all_);
  auto both = std::make_unique<CombinedTransfer>();
  try {
    for (const bool forward : {true, false}) {
      both->add(start_exchange(only(sent, forward), only(received, !forward), *all_));
    }
  } catch (...) {
    static_cast<void>(both.release());  // until the process ends: oneCCL still uses the memory of the first one
    throw;
  }
  return both;
}

// The parts of the hosts behind this one, or before it.
Parts OneCclFabric::only(Parts parts, bool behind) const {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const int host = host_numbers_[rank];
    if (behind ? host <= host_ : host >= host_) parts[rank] = {};
  }
  return parts;
}

void OneCclFabric::close() {
  for (auto& [lane, communicator] : lanes_) disconnect_oneccl(std::move(communicator), false);
  lanes_.clear();
  disconnect_oneccl(std::move(all_), false);
}

}  // namespace cpulaunch
