// cpulaunch's own transport: collectives by the hierarchy, and messages from rank to rank.

#pragma once

#include "operations.hpp"
#include "point_to_point.hpp"
#include "transport.hpp"

namespace cpulaunch {

class OwnTransport final : public Transport {
 public:
  OwnTransport(std::shared_ptr<Hierarchy> hierarchy, std::shared_ptr<PointToPoint> messages);

  std::unique_ptr<Transfer> start(const Collective& collective) override;
  void check_calls() override { hierarchy_->check_unasked(); }
  bool leave() override;
  void close(bool in_flight) override;

 private:
  std::shared_ptr<Hierarchy> hierarchy_;
  std::shared_ptr<PointToPoint> messages_;
};

}  // namespace cpulaunch
