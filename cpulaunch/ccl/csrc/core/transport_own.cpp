#include "transport_own.hpp"

#include <chrono>
#include <thread>

namespace cpulaunch {

namespace {

constexpr std::chrono::microseconds kLeaveInterval{100};

Abilities abilities_of(const Hierarchy& hierarchy) {
  Abilities can;
  can.messages = can.bitwise = true;
  can.shared_memory = hierarchy.layout.locals > 1;
  can.compressing_hosts = hierarchy.layout.hosts;
  return can;
}

}  // namespace

OwnTransport::OwnTransport(std::shared_ptr<Hierarchy> hierarchy, std::shared_ptr<PointToPoint> messages)
    : Transport(abilities_of(*hierarchy)),
      hierarchy_(std::move(hierarchy)),
      messages_(std::move(messages)) {}

std::unique_ptr<Transfer> OwnTransport::start(const Collective& its) {
  if (its.kind == Kind::send) return messages_->send(its.root, its.tag, its.sent[0].data, its.sent[0].bytes);
  if (its.kind == Kind::receive) {
    return messages_->receive(its.root, its.tag, its.received[0].data, its.received[0].bytes, its.source);
  }
  return hierarchy_->start(operations_of(*hierarchy_, its));
}

bool OwnTransport::leave() {
  const bool all = hierarchy_->leave_network();
  return (!messages_ || messages_->leave()) && all;
}

// Operations in flight hold these two objects, which close their connections when they are destroyed.
void OwnTransport::close(bool in_flight) {
  if (!in_flight) {
    hierarchy_->leave();
    while (!leave()) std::this_thread::sleep_for(kLeaveInterval);
  }
  hierarchy_.reset();
  messages_.reset();
}

}  // namespace cpulaunch
