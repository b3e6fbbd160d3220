// The Python module `_group`.

#include <sys/syscall.h>
#include <unistd.h>

#include <pybind11/stl.h>

#include <torch/csrc/utils/pybind.h>

#include "group.hpp"
#include "transport_fabric.hpp"

namespace py = pybind11;
using namespace cpulaunch;

// What carries a group's collectives, before its ranks are connected.
struct Carrier {
  std::function<std::unique_ptr<Transport>(const c10::intrusive_ptr<c10d::Store>& store)> connect;
  bool has_messages;
};
using CarrierPtr = std::shared_ptr<Carrier>;

// torch keeps its objects in this holder; the group is registered as a subclass of its Backend.
template <class T>
using Holder = c10::intrusive_ptr<T>;

PYBIND11_MODULE(_group, module) {
  module.doc() = "The oneCCL process group of cpulaunch.";
  py::module_::import("torch._C._distributed_c10d");  // the base class

  py::class_<ProcessGroupCCL, Holder<ProcessGroupCCL>, c10d::Backend>(module, "ProcessGroupCCL")
      .def(py::init([](Holder<c10d::Store> store, int rank, int size, double timeout, std::string name,
                       Members members, const std::vector<std::pair<int, int>>& local_peers,
                       std::tuple<std::string, std::string, std::string, std::string> heartbeat, double store_interval,
                       double silence, const CarrierPtr& carrier, py::function make_gloo) {
             std::vector<Peer> peers;
             for (const auto& [peer, pid] : local_peers) peers.push_back({peer, pid});
             auto [own_key, own_ip, next_key, next_host] = std::move(heartbeat);
             // The function outlives the group's Python object, and is let go of with the GIL.
             std::shared_ptr<py::function> function(new py::function(std::move(make_gloo)), [](py::function* held) {
               py::gil_scoped_acquire acquire;
               delete held;
             });
             auto connect = carrier->connect;
             py::gil_scoped_release release;
             return c10::make_intrusive<ProcessGroupCCL>(
                 std::move(store), rank, size, Milliseconds(static_cast<int64_t>(timeout * 1e3)), std::move(name),
                 std::move(members), std::move(peers),
                 Heartbeat{std::move(own_key), std::move(own_ip), std::move(next_key), std::move(next_host)},
                 StoreIntervals(Milliseconds(static_cast<int64_t>(store_interval * 1e3)),
                                Milliseconds(static_cast<int64_t>(silence * 1e3))),
                 std::move(connect),
                 [function] {
                   py::gil_scoped_acquire acquire;
                   return (*function)().cast<Holder<c10d::Backend>>();
                 });
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("timeout"), py::arg("name"),
           py::arg("members"), py::arg("local_peers"), py::arg("heartbeat"), py::arg("store_interval"),
           py::arg("silence"), py::arg("carrier"), py::arg("make_gloo"),
           "Connects the ranks; `local_peers` are (rank, pid) of the others on this host, `timeout` is in seconds,\n"
           "`heartbeat` is (key to write, this host's address, key to read, name of the host that writes that),\n"
           "empty for none;\n"
           "`store_interval` is how many seconds lie between two looks of a waiting rank into the store, and\n"
           "`silence` after how many, at the earliest, a host that says nothing counts as gone;\n"
           "`make_gloo` makes the gloo group of the same ranks, when it is first needed.")
      .def_property_readonly("shares_memory", &ProcessGroupCCL::shares_memory,
                             "Whether tensors that `share_memory` has moved are reduced where they are.")
      .def_static("share_memory", &ProcessGroupCCL::share_memory, py::arg("tensor"),
                  "Move a tensor's storage, and so all tensors on it, to memory that the other ranks of this host may\n"
                  "map.  False where there is none to be had; nothing is moved then.")
      .def_property_readonly("compressing_hosts", &ProcessGroupCCL::compressing_hosts,
                             "The number of hosts between which average_compressed compresses; 0: it can't.")
      .def("average_compressed", &ProcessGroupCCL::average_compressed, py::arg("tensor"),
           py::call_guard<py::gil_scoped_release>(),
           "Starts the average of a dense tensor over all ranks, in place, and returns its Work.  Between hosts,\n"
           "float32 numbers travel as bfloat16: each host's sum is rounded, and their total.  Other types are sent as\n"
           "they are.");

  py::class_<Members>(module, "Members")
      .def(py::init<std::vector<int>, std::string, std::vector<std::string>>(), py::arg("ranks"),
           py::arg("in_ledger"), py::arg("hosts"),
           "How messages name a group's ranks: `ranks` are their numbers in the job, `in_ledger` is how the ledger\n"
           "has those, and `hosts` are the names of their hosts, empty where there is one.");
  py::class_<Layout>(module, "Layout")
      .def(py::init<std::vector<int>, int, std::vector<int>, Members>(), py::arg("host_of"), py::arg("rank"),
           py::arg("socket_of"), py::arg("members"),
           "Which ranks share a host and a socket: `host_of` has for each rank the number of its host, and\n"
           "`socket_of` the socket of that host that it runs on, or -1.")
      .def_readonly("hosts", &Layout::hosts)
      .def_readonly("locals", &Layout::locals, "The number of ranks on this rank's host.")
      .def_property_readonly("first", [](const Layout& self) { return self.ranks_of[self.host][0]; },
                             "The first rank of this rank's host.");
  py::class_<SharedSlots, std::shared_ptr<SharedSlots>>(module, "SharedSlots");
  module.def(
      "offer_memory",
      [](const Layout& layout, bool fabric) {
        return SharedSlots::offer(layout.locals, SharedSlots::Shape(layout, fabric));
      },
      py::arg("layout"), py::kw_only(), py::arg("fabric"),
      "A descriptor of memory for the ranks of this host; -1 where there is none to be had.  Keep it open until all\n"
      "have mapped it.  `fabric`: oneCCL reduces between the hosts.");
  module.def(
      "map_memory",
      [](const Layout& layout, bool fabric, int pid, int descriptor) {
        auto slots = SharedSlots::map({pid, descriptor}, layout.locals, SharedSlots::Shape(layout, fabric));
        if (slots) slots->introduce(layout.local);
        return slots;
      },
      py::arg("layout"), py::kw_only(), py::arg("fabric"), py::arg("pid"), py::arg("descriptor"),
      "The memory that another rank of this host offers; None where this rank may not open it.");
  module.def(
      "listen",
      [](const std::string& ip) {
        const auto listener = Connector::listen(ip);
        return std::make_pair(listener.descriptor, listener.port);
      },
      py::arg("ip"), "A socket, (descriptor, port), for the connections of other hosts' ranks.");
  py::class_<Carrier, CarrierPtr>(module, "Carrier", "What carries a group's collectives.")
      .def_readonly("has_messages", &Carrier::has_messages, "Whether it carries send and recv, too.");
  module.def(
      "own_transport",
      [](const Layout& layout, std::shared_ptr<SharedSlots> slots, std::optional<std::pair<int, int>> listener,
         const std::vector<std::pair<std::string, int>>& addresses, const py::bytes& token) {
        std::shared_ptr<Connector> connector;
        std::unique_ptr<Network> network;
        if (listener) {
          std::vector<Connector::Address> all;
          for (const auto& [ip, port] : addresses) all.push_back({ip, port});
          const Connector::Listener ours{listener->first, listener->second};
          connector = std::make_shared<Connector>(layout.rank, ours, std::move(all), std::string(token));
          network = std::make_unique<Network>(layout, connector);
        }
        const auto hierarchy = std::make_shared<Hierarchy>(layout, slots, std::move(network));
        const auto messages = std::make_shared<PointToPoint>(layout, slots, connector);
        return Carrier{[=](auto&) { return std::make_unique<OwnTransport>(hierarchy, messages); }, true};
      },
      py::arg("layout"), py::kw_only(), py::arg("slots"), py::arg("listener"), py::arg("addresses"), py::arg("token"),
      "cpulaunch's own transport: `slots` is None where this rank is alone on its host, `listener` where there is\n"
      "one host; `addresses` has each rank's (ip, port), and `token` is the group's secret of 16 bytes.");
  module.def(
      "oneccl",
      [](const Layout& layout) {
        return Carrier{[rank = layout.rank, size = layout.size](
                           auto& store) { return std::make_unique<OneCclTransport>(store, rank, size); },
                       false};
      },
      py::arg("layout"), "oneCCL for all collectives.");
  module.def(
      "oneccl_between_hosts",
      [](const Layout& layout, std::shared_ptr<SharedSlots> slots) {
        return Carrier{[=](auto& store) { return std::make_unique<FabricTransport>(store, layout, slots); }, false};
      },
      py::arg("layout"), py::kw_only(), py::arg("slots"),
      "oneCCL between the hosts, and within a host the memory that its ranks share; `slots` is None where this rank\n"
      "is alone on its host.");

  module.def(
      "configure",
      [](bool offload, bool yield_cores, bool network, bool only_core, std::vector<int> cores) {
        ProgressOptions options;
        options.offload = offload;
        options.yield = yield_cores;
        options.network = network;
        options.only_core = only_core;
        options.cores = std::move(cores);
        ProgressEngine::instance().configure(std::move(options));
      },
      py::kw_only(), py::arg("offload"), py::arg("yield_cores"), py::arg("network"),
      py::arg("only_core"), py::arg("cores"),
      "How collectives are driven; before the first group is made.");
  ProgressEngine::instance().set_signal_handling([] {
    if (syscall(SYS_gettid) != getpid()) return;  // Python's other threads handle none
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
  module.def(
      "open_ledger",
      [](const py::buffer& mapping) {
        // Its buffer is held for ever: the mapping can't be closed.
        const auto* buffer = new py::buffer_info(mapping.request(/*writable=*/true));
        TORCH_CHECK(static_cast<size_t>(buffer->size * buffer->itemsize) == ledger::kSize, "not a ledger");
        ledger::open(buffer->ptr);
      },
      py::arg("mapping"), "Begin to write this process's ledger (cpulaunch/ledger.py).");
  module.def("in_flight", [] { return ProgressEngine::instance().in_flight(); },
             "One line for each asynchronous collective that is not completed.");
  module.def("check_calls", &ProcessGroupCCL::check_all_calls, py::call_guard<py::gil_scoped_release>(),
             "Throws DistBackendError where ranks are known to have called different collectives of a group that is\n"
             "still open, though none of this rank's has failed.");
  module.def(
      "shutdown",
      [](bool has_failed) {
        py::gil_scoped_release release;
        return ProgressEngine::instance().shutdown(has_failed);
      },
      py::arg("has_failed"), "Ends all progress; true when nothing was in flight.");
  module.def("version", [] { return std::string(ccl::get_library_version().full); }, "oneCCL's version.");
}
