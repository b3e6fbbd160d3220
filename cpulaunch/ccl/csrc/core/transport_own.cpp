#include "transport_own.hpp"

#include <cstring>
#include <stdexcept>

namespace cpulaunch {

namespace {

// What a fabric between the hosts reduces, it must be able to; what it only moves, the ranks reduce.
Abilities abilities_of(const Hierarchy& hierarchy, bool has_messages) {
  const bool has_fabric = hierarchy.fabric() != nullptr;
  Abilities can;
  can.messages = has_messages;
  can.bitwise = !has_fabric;
  can.bitwise_scatter = true;
  can.shared_memory = hierarchy.layout.locals > 1;
  can.compressing_hosts = has_fabric ? 0 : hierarchy.layout.hosts;
  return can;
}

Signature signature_of(const Collective& its) {
  return {its.kind, its.type, its.reduction, its.wire, its.root, its.received[0].bytes};
}

std::vector<size_t> sizes_of(const Parts& parts) {
  std::vector<size_t> sizes;
  for (const auto& part : parts) sizes.push_back(part.bytes);
  return sizes;
}

template <class Data>
std::vector<Data> data_of(const Parts& parts) {
  std::vector<Data> data;
  for (const auto& part : parts) data.push_back(part.data);
  return data;
}

// Only what goes to one rank, or comes from it.
Parts only(const Parts& part, int rank, int size) {
  Parts parts(size);
  parts[rank] = part[0];
  return parts;
}

Parts or_none(const Parts& parts, int size) { return parts.empty() ? Parts(size) : parts; }

}  // namespace

OwnTransport::OwnTransport(std::shared_ptr<Hierarchy> hierarchy, std::shared_ptr<PointToPoint> messages)
    : Transport(abilities_of(*hierarchy, messages != nullptr)),
      hierarchy_(std::move(hierarchy)),
      messages_(std::move(messages)) {}

std::unique_ptr<Transfer> OwnTransport::start(const Collective& its) {
  auto& hierarchy = *hierarchy_;
  const int size = hierarchy.layout.size;
  const auto exchange = [&](Parts sent, Parts received) {
    Signature signature{its.kind};
    signature.root = its.root;
    auto all = std::make_unique<CombinedTransfer>();
    for (auto& operation : make_all_to_all(hierarchy, std::move(sent), std::move(received), signature)) {
      all->add(hierarchy.start(std::move(operation)));
    }
    return all;
  };
  switch (its.kind) {
    case Kind::reduce:  // all ranks get the sum, in memory that all but the root throw away
      if (its.sent[0].data != its.received[0].data) {
        std::memcpy(its.received[0].data, its.sent[0].data, its.sent[0].bytes);
      }
      [[fallthrough]];
    case Kind::all_reduce:
    case Kind::barrier:
      return hierarchy.start(make_all_reduce(hierarchy, its.received[0].data, signature_of(its)));
    case Kind::broadcast:
      return hierarchy.start(make_broadcast(hierarchy, its.received[0].data, its.received[0].bytes, its.root));
    case Kind::all_gather:
      return hierarchy.start(make_all_gather(hierarchy, its.sent[0].data, data_of<char*>(its.received),
                                             sizes_of(its.received)));
    case Kind::reduce_scatter:
      return hierarchy.start(make_reduce_scatter(hierarchy, its.received[0].data, data_of<const char*>(its.sent),
                                                 sizes_of(its.sent), its.type, its.reduction));
    case Kind::all_to_all: return exchange(its.sent, its.received);
    case Kind::gather: return exchange(only(its.sent, its.root, size), or_none(its.received, size));
    case Kind::scatter: return exchange(or_none(its.sent, size), only(its.received, its.root, size));
    case Kind::send: return messages_->send(its.root, its.tag, its.sent[0].data, its.sent[0].bytes);
    case Kind::receive:
      return messages_->receive(its.root, its.tag, its.received[0].data, its.received[0].bytes, its.source);
  }
  throw std::logic_error("an unknown collective");
}

// What is in flight holds these two, whose connections are closed when they go.
void OwnTransport::close(bool in_flight) {
  if (!in_flight) {
    hierarchy_->leave();
    if (hierarchy_->fabric()) hierarchy_->fabric()->close();
  } else if (hierarchy_->fabric()) {
    new auto(hierarchy_);  // until the process ends: the fabric still uses the memory of what it has started
  }
  hierarchy_.reset();
  messages_.reset();
}

}  // namespace cpulaunch
