// The Python module `_group`.

#include <pybind11/stl.h>

#include <torch/csrc/utils/pybind.h>

#include "group.hpp"

namespace py = pybind11;
using namespace cpulaunch;

// torch keeps its objects in this holder; the group is registered as a subclass of its Backend.
template <class T>
using Holder = c10::intrusive_ptr<T>;

PYBIND11_MODULE(_group, module) {
  module.doc() = "The oneCCL process group of cpulaunch.";
  py::module_::import("torch._C._distributed_c10d");  // the base class

  py::class_<ProcessGroupCCL, Holder<ProcessGroupCCL>, c10d::Backend>(module, "ProcessGroupCCL")
      .def(py::init([](Holder<c10d::Store> store, int rank, int size, double timeout, std::string name,
                       const std::vector<std::pair<int, int>>& local_peers,
                       std::tuple<std::string, std::string, std::string> heartbeat,
                       int shared_memory, Holder<c10d::Backend> companion) {
             std::vector<Peer> peers;
             for (const auto& [peer, pid] : local_peers) peers.push_back({peer, pid});
             auto [own, next, next_host] = std::move(heartbeat);
             py::gil_scoped_release release;
             std::shared_ptr<HostSum> host_sum;
             try {
               if (shared_memory >= 0) host_sum = std::make_shared<HostSum>(shared_memory, rank, size);
             } catch (const std::system_error&) {
               // No room for it here: oneCCL sums.
             }
             return c10::make_intrusive<ProcessGroupCCL>(std::move(store), rank, size,
                                                         Milliseconds(static_cast<int64_t>(timeout * 1e3)),
                                                         std::move(name), std::move(peers),
                                                         Heartbeat{std::move(own), std::move(next), std::move(next_host)},
                                                         std::move(host_sum), std::move(companion));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("timeout"), py::arg("name"),
           py::arg("local_peers"), py::arg("heartbeat"), py::arg("shared_memory"), py::arg("companion"),
           "Connects the ranks; `local_peers` are (rank, pid) of the others on this host, `timeout` is in seconds,\n"
           "`heartbeat` is (key to write, key to listen to, name of the host that writes it), empty for none;\n"
           "`shared_memory` is a descriptor of what make_shared_memory(size) made in one of them, or -1.");

  module.def(
      "configure",
      [](bool offload, bool yield_cores, bool only_core, std::vector<int> cores) {
        EngineOptions options;
        options.offload = offload;
        options.yield = yield_cores;
        options.only_core = only_core;
        options.cores = std::move(cores);
        Engine::instance().configure(std::move(options));
      },
      py::kw_only(), py::arg("offload"), py::arg("yield_cores"), py::arg("only_core"), py::arg("cores"),
      "How collectives are driven; before the first group is made.");
  module.def("make_shared_memory", &HostSum::make_memory, py::arg("size"),
             "A descriptor of what the ranks of one host share for their sums; -1 where it is not to be had.");
  module.def("in_flight", [] { return Engine::instance().in_flight(); },
             "One line for each asynchronous collective that is not completed.");
  module.def(
      "shutdown",
      [] {
        py::gil_scoped_release release;
        return Engine::instance().shutdown();
      },
      "Lets nobody into oneCCL any more; true when nothing was in flight.");
  module.def("version", [] { return std::string(ccl::get_library_version().full); }, "oneCCL's version.");
}
