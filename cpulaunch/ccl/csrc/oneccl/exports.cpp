// What this library exports: oneCCL's carriers, for Python.

#include <cstring>

#include "boundary.hpp"
#include "transports.hpp"

using namespace cpulaunch;

namespace {

struct OneCclCarrier : cl_carrier {
  cl_layout* layout;
  cl_slots* slots;
};

template <cl_transport* make(const cl_store&, const OneCclCarrier&)>
cl_carrier* carrier_of(const cl_layout* layout, const cl_slots* slots) {
  auto* carrier = new OneCclCarrier;
  carrier->connect = [](cl_carrier* self, const cl_store* store, cl_error* error) {
    return guarded(error, [&] { return make(*store, *static_cast<OneCclCarrier*>(self)); });
  };
  carrier->destroy = [](cl_carrier* self) {
    auto* its = static_cast<OneCclCarrier*>(self);
    cl_layout_free(its->layout);
    cl_slots_free(its->slots);
    delete its;
  };
  carrier->layout = cl_layout_copy(layout);
  carrier->slots = cl_slots_copy(slots);
  return carrier;
}

cl_transport* make_transport(const cl_store& store, const OneCclCarrier& carrier) {
  const auto facts = cl_layout_look(carrier.layout);
  return export_transport(std::make_unique<OneCclTransport>(store, facts.rank, facts.size));
}

cl_transport* make_fabric_transport(const cl_store& store, const OneCclCarrier& carrier) {
  const auto facts = cl_layout_look(carrier.layout);
  auto fabric = std::make_unique<OneCclFabric>(store, facts);
  return cl_fabric_transport(carrier.layout, carrier.slots, export_fabric(std::move(fabric), facts.hosts, facts.size));
}

}  // namespace

extern "C" {

// oneCCL for all collectives.
CL_EXPORT cl_carrier* cl_oneccl_carrier(const cl_layout* layout) { return carrier_of<make_transport>(layout, nullptr); }

// oneCCL between the hosts, and within a host the memory that its ranks share; `slots` is null where this rank is
// alone on its host.
CL_EXPORT cl_carrier* cl_oneccl_fabric_carrier(const cl_layout* layout, const cl_slots* slots) {
  return carrier_of<make_fabric_transport>(layout, slots);
}

}  // extern "C"
