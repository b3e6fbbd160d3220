#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "transports.hpp"

namespace cpulaunch {

namespace {

// Returns a transfer that is done already.
std::unique_ptr<Transfer> done_at_once() { return std::make_unique<CombinedTransfer>(); }

// Data that is only moved, not reduced, is moved as the widest integers whose size divides all these sizes.
struct Elements {
  ccl::datatype type;
  size_t bytes;
};

Elements elements_of(const std::vector<size_t>& sizes) {
  const auto all = [&](size_t bytes) {
    return std::all_of(sizes.begin(), sizes.end(), [&](size_t each) { return each % bytes == 0; });
  };
  if (all(8)) return {ccl::datatype::int64, 8};
  if (all(4)) return {ccl::datatype::int32, 4};
  if (all(2)) return {ccl::datatype::int16, 2};
  return {ccl::datatype::int8, 1};
}

size_t count_of(const Part& part, NumberType type) { return part.bytes / size_of(type); }

}  // namespace

std::unique_ptr<Transfer> OneCclTransport::start(const Collective& its) {
  switch (its.kind) {
    case Kind::all_reduce:
    case Kind::barrier: {  // oneCCL's own barrier would block its caller without a time limit
      const auto& data = its.received[0];
      if (data.bytes == 0) return done_at_once();
      return divided(its, data, start_oneccl([&] {
                       return ccl::allreduce(data.data, data.data, count_of(data, its.type), datatype_of(its.type),
                                             reduction_of(its.type, its.reduction), *communicator_);
                     }));
    }
    case Kind::reduce: return reduce(its, its.sent[0], its.received[0], its.root);
    case Kind::reduce_scatter: return reduce_scatter(its);
    case Kind::all_gather: return gather_all(its);
    case Kind::broadcast: {
      const auto& data = its.received[0];
      if (data.bytes == 0) return done_at_once();
      const auto elements = elements_of({data.bytes});
      return start_oneccl([&] {
        return ccl::broadcast(data.data, data.bytes / elements.bytes, elements.type, its.root, *communicator_);
      });
    }
    case Kind::all_to_all: return exchange(its.sent, its.received);
    case Kind::gather: return exchange(only(its.sent[0], its.root), or_none(its.received));
    case Kind::scatter: return exchange(or_none(its.sent), only(its.received[0], its.root));
    default: throw std::logic_error("oneCCL sends no messages but between GPUs");
  }
}

std::unique_ptr<Transfer> OneCclTransport::divided(const Collective& its, const Part& to,
                                                   std::unique_ptr<Transfer> transfer) const {
  if (its.reduction != Reduction::average) return transfer;
  return then(std::move(transfer), [to, type = static_cast<uint8_t>(its.type), size = size_] {
    cl_divide(to.data, to.bytes, type, size);
  });
}

std::unique_ptr<Transfer> OneCclTransport::reduce(const Collective& its, const Part& from, const Part& to, int root) {
  if (from.bytes == 0) return done_at_once();
  auto transfer = start_oneccl([&] {
    return ccl::reduce(from.data, to.data, count_of(from, its.type), datatype_of(its.type),
                       reduction_of(its.type, its.reduction), root, *communicator_);
  });
  return rank_ == root ? divided(its, to, std::move(transfer)) : std::move(transfer);
}

std::unique_ptr<Transfer> OneCclTransport::reduce_scatter(const Collective& its) {
  const auto& output = its.received[0];
  const auto same = [&](const Part& part) { return part.bytes == output.bytes; };
  if (std::all_of(its.sent.begin(), its.sent.end(), same)) {
    if (output.bytes == 0) return done_at_once();
    const auto from = std::make_shared<SideBySide>(its.sent);
    from->join();
    auto transfer = start_oneccl([&] {
      return ccl::reduce_scatter(from->data, output.data, count_of(output, its.type), datatype_of(its.type),
                                 reduction_of(its.type, its.reduction), *communicator_);
    });
    return divided(its, output, then(std::move(transfer), [from] {}));
  }
  auto all = std::make_unique<CombinedTransfer>();  // a reduction to each rank
  for (int rank = 0; rank < size_; ++rank) {
    const auto& part = its.sent[rank];
    if (part.bytes == 0) continue;
    const std::shared_ptr<char[]> unused(rank == rank_ ? nullptr : new char[part.bytes]);
    const Part to{rank == rank_ ? output.data : unused.get(), part.bytes};
    all->add(then(reduce(its, part, to, rank), [unused] {}));
  }
  return all;
}

// With a list of buffers, oneCCL's allgatherv would block its caller, without a time limit, until all ranks have come:
// only its algorithms `flat` and `multi_bcast` take a list, and they are synchronous then.
std::unique_ptr<Transfer> OneCclTransport::gather_all(const Collective& its) {
  const auto to = std::make_shared<SideBySide>(its.received);
  if (to->bytes == 0) return done_at_once();
  const auto elements = elements_of(to->sizes);
  for (auto& size : to->sizes) size /= elements.bytes;
  auto transfer = start_oneccl([&] {
    return ccl::allgatherv(its.sent[0].data, to->sizes[rank_], to->data, to->sizes, elements.type, *communicator_);
  });
  return then(std::move(transfer), [to] { to->split(); });
}

std::unique_ptr<Transfer> OneCclTransport::exchange(Parts sent, Parts received) {
  const auto from = std::make_shared<SideBySide>(std::move(sent));
  const auto to = std::make_shared<SideBySide>(std::move(received));
  from->join();
  auto transfer = start_oneccl([&] {
    return ccl::alltoallv(from->data, from->sizes, to->data, to->sizes, ccl::datatype::uint8, *communicator_);
  });
  return then(std::move(transfer), [from, to] { to->split(); });
}

Parts OneCclTransport::only(const Part& part, int rank) const {
  Parts parts(size_);
  parts[rank] = part;
  return parts;
}

}  // namespace cpulaunch
