// Exports oneCCL's carrier to Python.

#include "boundary.hpp"
#include "transports.hpp"

using namespace cpulaunch;

namespace {

struct OneCclCarrier : cl_carrier {
  cl_layout_facts layout;
};

cl_transport* connect(cl_carrier* self, const cl_store* store, cl_error* error) {
  const auto& layout = static_cast<OneCclCarrier*>(self)->layout;
  return guarded(error, [&] {
    return export_transport(std::make_unique<OneCclTransport>(*store, layout.rank, layout.size));
  });
}

}  // namespace

extern "C" {

CL_EXPORT cl_carrier* cl_oneccl_carrier(const cl_layout* layout) {
  auto* carrier = new OneCclCarrier;
  carrier->connect = connect;
  carrier->destroy = [](cl_carrier* self) { delete static_cast<OneCclCarrier*>(self); };
  carrier->layout = cl_layout_look(layout);
  return carrier;
}

}  // extern "C"
