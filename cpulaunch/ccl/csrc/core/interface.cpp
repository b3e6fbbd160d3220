// The functions that the core exports (interface.h).

#include "interface.h"

#include <algorithm>
#include <cstring>

#include "boundary.hpp"
#include "liveness.hpp"
#include "network_fabric.hpp"
#include "network_striped.hpp"
#include "team.hpp"
#include "transport_own.hpp"

using namespace cpulaunch;

struct cl_layout {
  Layout layout;
};
struct cl_slots {
  std::shared_ptr<SharedSlots> slots;
};
struct cl_endpoint {
  std::unique_ptr<FabricEndpoint> endpoint;
};
struct cl_process {
  std::shared_ptr<Process> process;
};
struct cl_server {
  std::shared_ptr<StoreServer> server;
};
struct cl_beacon {
  Beacon beacon;
  std::string address = beacon.address();
};
struct cl_remote {
  RemoteProcess process;
};

namespace {

std::shared_ptr<SharedSlots> slots_of(const cl_slots* slots) { return slots ? slots->slots : nullptr; }

struct OwnCarrier : cl_carrier {
  std::shared_ptr<Hierarchy> hierarchy;
  std::shared_ptr<PointToPoint> messages;
};

cl_transport* connect(cl_carrier* self, const cl_store*, cl_error* error) {
  auto& carrier = *static_cast<OwnCarrier*>(self);
  return guarded(error, [&] {
    carrier.hierarchy->meet();
    return export_transport(std::make_unique<OwnTransport>(std::move(carrier.hierarchy), std::move(carrier.messages)));
  });
}

}  // namespace

cl_layout* cl_layout_make(int32_t size, int32_t rank, const int32_t* host_of, const int32_t* socket_of,
                          const int32_t* numbers, const char* const* host_names, int32_t threads,
                          uint64_t cache) {
  const std::vector<int> hosts(host_of, host_of + size), sockets(socket_of, socket_of + size);
  std::vector<std::string> names;
  for (int each = 0; host_names && each < size; ++each) names.emplace_back(host_names[each]);
  Layout layout(hosts, rank, sockets, Members({numbers, numbers + size}, std::move(names)), threads);
  layout.large = std::max<size_t>(layout.large, cache / 2);  // the other half is for what the result is made from
  return new cl_layout{std::move(layout)};
}
void cl_layout_free(cl_layout* layout) { delete layout; }
cl_layout_facts cl_layout_look(const cl_layout* layout) {
  const auto& its = layout->layout;
  return {its.rank, its.size};
}

int cl_memory_offer(const cl_layout* layout) {
  return SharedSlots::offer(layout->layout.locals, SharedSlots::Shape(layout->layout));
}
cl_slots* cl_memory_map(const cl_layout* layout, int pid, int descriptor) {
  const auto& its = layout->layout;
  auto slots = SharedSlots::map({pid, descriptor}, its.locals, SharedSlots::Shape(its));
  if (!slots) return nullptr;
  slots->introduce(its.local);
  return new cl_slots{std::move(slots)};
}
void cl_slots_free(cl_slots* slots) { delete slots; }

int cl_listen(const char* ip, int32_t* port, cl_error* error) {
  try {
    const auto listener = Connector::listen(ip);
    *port = listener.port;
    return listener.descriptor;
  } catch (const std::exception& what) {
    set_error(error, what);
    return -1;
  }
}

void cl_listen_within(int32_t first, int32_t last) { Connector::listen_within(first, last); }

cl_endpoint* cl_endpoint_open(const char* library, const char* ip, cl_error* error) {
  return guarded(error, [&] { return new cl_endpoint{std::make_unique<FabricEndpoint>(library, ip)}; });
}
void cl_endpoint_free(cl_endpoint* endpoint) { delete endpoint; }
const char* cl_endpoint_name(const cl_endpoint* endpoint, size_t* size) {
  const auto& name = endpoint->endpoint->name();
  *size = name.size();
  return name.data();
}
void cl_endpoint_know(cl_endpoint* endpoint, const char* const* names, const size_t* sizes, int32_t count,
                      cl_error* error) {
  guarded(error, [&] {
    std::vector<std::string> all;
    for (int32_t rank = 0; rank < count; ++rank) all.emplace_back(names[rank], sizes[rank]);
    endpoint->endpoint->know(all);
  });
}

cl_carrier* cl_own_carrier(const cl_layout* layout, const cl_slots* slots, int listener, int32_t port,
                           const char* const* ips, const int32_t* ports, const char* key, size_t key_size,
                           cl_endpoint* endpoint, int32_t connections, cl_error* error) {
  const auto& its = layout->layout;
  return guarded(error, [&] {
    std::shared_ptr<Connector> connector;
    std::unique_ptr<Network> network;
    if (listener >= 0) {
      std::vector<Connector::Address> addresses;
      for (int rank = 0; rank < its.size; ++rank) addresses.push_back({ips[rank], ports[rank]});
      Connector::choose_sources(addresses, its.host_numbers, its.rank);
      connector = std::make_shared<Connector>(its.rank, Connector::Listener{listener, port}, std::move(addresses),
                                              std::string(key, key_size), connections + 1);  // one for messages
      if (endpoint) {
        network = std::make_unique<FabricNetwork>(its, connector, std::move(endpoint->endpoint));
      } else {
        network = make_tcp_network(its, connector, connections);
      }
    }
    auto carrier = std::make_unique<OwnCarrier>();
    carrier->connect = connect;
    carrier->destroy = [](cl_carrier* self) { delete static_cast<OwnCarrier*>(self); };
    carrier->hierarchy = std::make_shared<Hierarchy>(its, slots_of(slots), std::move(network));
    carrier->messages = std::make_shared<PointToPoint>(its, slots_of(slots), connector);
    return static_cast<cl_carrier*>(carrier.release());
  });
}
void cl_carrier_free(cl_carrier* carrier) { carrier->destroy(carrier); }

void cl_divide(char* data, size_t bytes, uint8_t type, int divisor) {
  divide(data, bytes, static_cast<NumberType>(type), divisor);
}

const cl_team* cl_lend_team(const cl_team* team) { return lend_team(team); }
void cl_moved(uint64_t* copied, uint64_t* summed) {
  const auto moved = moved_by_this_thread();
  *copied = moved.copied, *summed = moved.summed;
}

char* cl_block_copy(const char* from, size_t bytes) { return SharedBlocks::copy(from, bytes); }
char* cl_block_take(size_t bytes) { return SharedBlocks::take(bytes); }
void cl_block_free(char* memory) { SharedBlocks::free(memory); }
int cl_block_holds(const char* memory, size_t bytes) { return static_cast<bool>(SharedBlocks::find(memory, bytes)); }

int64_t cl_clock_now() { return Clock::now().time_since_epoch().count(); }
int64_t cl_clock_steady(int64_t time) {
  return Clock::steady(Clock::time_point(Clock::duration(time))).time_since_epoch().count();
}

cl_process* cl_process_of(int32_t pid) { return new cl_process{Process::of(pid)}; }
void cl_process_free(cl_process* process) { delete process; }
int cl_process_error(const cl_process* process) { return process->process->error(); }
int cl_process_has_ended(const cl_process* process) { return process->process->has_ended(); }

cl_server* cl_server_of(const char* host, int32_t port) {
  return new cl_server{host ? StoreServer::at(host, static_cast<uint16_t>(port)) : std::make_shared<StoreServer>(-1)};
}
void cl_server_free(cl_server* server) { delete server; }
int cl_server_is_gone(const cl_server* server) { return server->server->is_gone(); }
void cl_server_make_patient(const cl_server* server) { server->server->make_patient(); }
void cl_server_begin_query(cl_server* server) { server->server->begin_query(); }
int64_t cl_server_end_query(cl_server* server) { return server->server->end_query().count(); }
int cl_server_is_silent_for(cl_server* server, int64_t milliseconds) {
  return server->server->is_silent_for(std::chrono::milliseconds(milliseconds));
}

cl_beacon* cl_beacon_make(const char* ip) {
  try {
    return new cl_beacon{Beacon(ip)};
  } catch (const std::runtime_error&) {
    return nullptr;
  }
}
void cl_beacon_free(cl_beacon* beacon) { delete beacon; }
const char* cl_beacon_address(const cl_beacon* beacon) { return beacon->address.c_str(); }
void cl_beacon_close_connections(const cl_beacon* beacon) { beacon->beacon.close_connections(); }

cl_remote* cl_remote_at(const char* address) { return new cl_remote{RemoteProcess(address)}; }
void cl_remote_free(cl_remote* remote) { delete remote; }
int cl_remote_is_there(const cl_remote* remote, int64_t within_milliseconds) {
  return remote->process.is_there(std::chrono::milliseconds(within_milliseconds));
}
int cl_remote_has_ended(cl_remote* remote) { return remote->process.has_ended(); }
