#include "transport_fabric.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace cpulaunch {

namespace {

ccl::datatype datatype_of(NumberType type) {
  switch (type) {
    case NumberType::float64: return ccl::datatype::float64;
    case NumberType::float32: return ccl::datatype::float32;
    case NumberType::float16: return ccl::datatype::float16;
    case NumberType::bfloat16: return ccl::datatype::bfloat16;
    case NumberType::int64: return ccl::datatype::int64;
    case NumberType::int32: return ccl::datatype::int32;
    case NumberType::int16: return ccl::datatype::int16;
    case NumberType::int8: return ccl::datatype::int8;
    case NumberType::uint64: return ccl::datatype::uint64;
    case NumberType::uint32: return ccl::datatype::uint32;
    case NumberType::uint16: return ccl::datatype::uint16;
    case NumberType::uint8:
    case NumberType::boolean: break;
  }
  return ccl::datatype::uint8;
}

// Throws for the bitwise ones.
ccl::reduction reduction_of(NumberType type, Reduction reduction) {
  const bool boolean = type == NumberType::boolean;  // a byte of 0 or 1 that has to stay one
  switch (reduction) {
    case Reduction::sum: return boolean ? ccl::reduction::max : ccl::reduction::sum;
    case Reduction::average: return ccl::reduction::sum;  // divided in the end
    case Reduction::product: return boolean ? ccl::reduction::min : ccl::reduction::prod;
    case Reduction::min: return ccl::reduction::min;
    case Reduction::max: return ccl::reduction::max;
    default: TORCH_CHECK_VALUE(false, "ccl: oneCCL has no ", name_of(reduction));
  }
}

}  // namespace

// A lane's ranks wait for each other, one of which may have several lanes.  All connect theirs in ascending order: so
// the ranks of the lowest lane that is not connected are done with all lower ones, and meet.
OneCclFabric::OneCclFabric(const c10::intrusive_ptr<c10d::Store>& store, const Layout& layout) {
  for (int lane = layout.local; lane < layout.lanes; lane += layout.locals) {
    const auto its_store = c10::make_intrusive<c10d::PrefixStore>("lane/" + std::to_string(lane), store);
    lanes_[lane] = connect_oneccl(its_store, layout.host, layout.hosts);
  }
}

std::unique_ptr<Transfer> OneCclFabric::reduce(int lane, char* data, size_t bytes, NumberType type,
                                               Reduction reduction) {
  const auto& communicator = *lanes_.at(lane);
  const auto operation = reduction_of(type, reduction);
  return start_oneccl([&] {
    return ccl::allreduce(data, data, bytes / size_of(type), datatype_of(type), operation, communicator);
  });
}

void OneCclFabric::close() {
  for (auto& [lane, communicator] : lanes_) disconnect_oneccl(std::move(communicator), false);
  lanes_.clear();
}

FabricTransport::FabricTransport(const c10::intrusive_ptr<c10d::Store>& store, const Layout& layout,
                                 std::shared_ptr<SharedSlots> slots)
    : OneCclTransport(store, layout.rank, layout.size),
      fabric_(std::make_shared<OneCclFabric>(store, layout)),
      sums_(std::make_shared<Hierarchy>(layout, std::move(slots), nullptr, fabric_), nullptr) {}

void FabricTransport::close(bool in_flight) {
  if (in_flight) {
    new auto(fabric_);  // until the process ends, as the communicators
  } else {
    fabric_->close();
  }
  sums_.close(in_flight);
  OneCclTransport::close(in_flight);
}

}  // namespace cpulaunch
