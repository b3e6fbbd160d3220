#include "transport_fabric.hpp"

#include <cstring>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "reduction.hpp"

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

// Parts side by side, as oneCCL takes them: the parts themselves where they lie so.
class SideBySide {
 public:
  explicit SideBySide(std::vector<Part> parts) : parts_(std::move(parts)) {
    bool adjacent = true;
    size_t all = 0;
    for (const auto& part : parts_) {
      sizes.push_back(part.bytes);
      all += part.bytes;
      if (part.bytes == 0) continue;
      if (!data) data = part.data;
      adjacent = adjacent && data + all - part.bytes == part.data;
    }
    if (adjacent) return;
    joined_.reset(new char[all]);
    data = joined_.get();
  }

  void join() const {
    for_each([](char* joined, const Part& part) { std::memcpy(joined, part.data, part.bytes); });
  }
  void split() const {
    for_each([](const char* joined, const Part& part) { std::memcpy(part.data, joined, part.bytes); });
  }

  std::vector<size_t> sizes;
  char* data = nullptr;

 private:
  template <class Act>
  void for_each(const Act& act) const {
    char* at = joined_.get();
    for (const auto& part : parts_) {
      if (!at || part.bytes == 0) continue;
      act(at, part);
      at += part.bytes;
    }
  }

  std::vector<Part> parts_;
  std::unique_ptr<char[]> joined_;
};

// Between all ranks.
class Exchange final : public Transfer {
 public:
  Exchange(std::vector<Part> sent, std::vector<Part> received, const ccl::communicator& all)
      : sent_(std::move(sent)), received_(std::move(received)) {
    sent_.join();
    transfer_ = start_oneccl([&] {
      return ccl::alltoallv(sent_.data, sent_.sizes, received_.data, received_.sizes, ccl::datatype::uint8, all);
    });
  }

  // One thread at a time calls it: the hierarchy's operations take turns.
  bool test() override {
    if (!done_ && transfer_->test()) {
      received_.split();
      done_ = true;
    }
    return done_;
  }
  void abort() override { transfer_->abort(); }
  std::string stragglers() override { return ""; }

 private:
  SideBySide sent_, received_;
  std::unique_ptr<Transfer> transfer_;
  bool done_ = false;
};

}  // namespace

// A lane's ranks wait for each other, one of which may have several lanes.  All connect theirs in ascending order: so
// the ranks of the lowest lane that is not connected are done with all lower ones, and meet.
OneCclFabric::OneCclFabric(const c10::intrusive_ptr<c10d::Store>& store, const Layout& layout)
    : host_(layout.host),
      hosts_(layout.hosts),
      host_numbers_(layout.host_numbers),
      all_(connect_oneccl(store, layout.rank, layout.size)) {
  layout.for_each_lane(layout.local, [&](int lane) {
    const auto its_store = c10::make_intrusive<c10d::PrefixStore>("lane/" + std::to_string(lane), store);
    lanes_[lane] = connect_oneccl(its_store, layout.host, layout.hosts);
  });
}

OneCclFabric::Result OneCclFabric::reduce(int lane, char* data, size_t bytes, NumberType type, Reduction reduction) {
  const auto operation = reduction_of(type, reduction);
  return start_oneccl([&] {
    return ccl::allreduce(data, data, bytes / size_of(type), datatype_of(type), operation, *lanes_.at(lane));
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
OneCclFabric::Result OneCclFabric::exchange_all(const std::vector<Part>& sent, const std::vector<Part>& received) {
  if (hosts_ == 2) return std::make_unique<Exchange>(sent, received, *all_);
  auto both = std::make_unique<CombinedTransfer>();
  try {
    for (const bool forward : {true, false}) {
      both->add(std::make_unique<Exchange>(only(sent, forward), only(received, !forward), *all_));
    }
  } catch (...) {
    static_cast<void>(both.release());  // until the process ends: oneCCL still uses the memory of the first one
    throw;
  }
  return both;
}

// The parts of the hosts behind this one, or before it.
std::vector<Part> OneCclFabric::only(std::vector<Part> parts, bool behind) const {
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

void FabricTransport::check_reduction(c10::ScalarType type, Op op) const {
  if (is_bitwise(op)) {
    OwnTransport::check_reduction(type, op);
  } else {
    check_oneccl_reduction(type, op);
  }
}

void FabricTransport::close(bool in_flight) {
  if (in_flight) {
    new auto(fabric_);  // until the process ends, as the communicators
  } else {
    fabric_->close();
  }
  OwnTransport::close(in_flight);
}

}  // namespace cpulaunch
