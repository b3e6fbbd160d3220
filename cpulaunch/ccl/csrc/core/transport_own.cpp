#include "transport_own.hpp"

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

}  // namespace

OwnTransport::OwnTransport(std::shared_ptr<Hierarchy> hierarchy, std::shared_ptr<PointToPoint> messages)
    : Transport(abilities_of(*hierarchy, messages != nullptr)),
      hierarchy_(std::move(hierarchy)),
      messages_(std::move(messages)) {}

std::unique_ptr<Transfer> OwnTransport::start(const Collective& its) {
  if (its.kind == Kind::send) return messages_->send(its.root, its.tag, its.sent[0].data, its.sent[0].bytes);
  if (its.kind == Kind::receive) {
    return messages_->receive(its.root, its.tag, its.received[0].data, its.received[0].bytes, its.source);
  }
  auto [first, second] = operations_of(*hierarchy_, its);
  auto transfer = hierarchy_->start(std::move(first));
  if (!second) return transfer;
  auto both = std::make_unique<CombinedTransfer>();
  both->add(std::move(transfer));
  both->add(hierarchy_->start(std::move(second)));
  return both;
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
