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
                       std::pair<int, int> shared_memory, Holder<c10d::Backend> gloo_fallback) {
             std::vector<Peer> peers;
             for (const auto& [peer, pid] : local_peers) peers.push_back({peer, pid});
             auto [own_key, next_key, next_host] = std::move(heartbeat);
             py::gil_scoped_release release;
             return c10::make_intrusive<ProcessGroupCCL>(
                 std::move(store), rank, size, Milliseconds(static_cast<int64_t>(timeout * 1e3)), std::move(name),
                 std::move(peers), Heartbeat{std::move(own_key), std::move(next_key), std::move(next_host)},
                 ShmOffer{shared_memory.first, shared_memory.second}, std::move(gloo_fallback));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("timeout"), py::arg("name"),
           py::arg("local_peers"), py::arg("heartbeat"), py::arg("shared_memory"), py::arg("gloo_fallback"),
           "Connects the ranks; `local_peers` are (rank, pid) of the others on this host, `timeout` is in seconds,\n"
           "`heartbeat` is (key to write, key to read, name of the host that writes that), empty for none;\n"
           "`shared_memory` is rank 0's (pid, descriptor), of which offer_shared_memory() made the latter.");

  module.def(
      "configure",
      [](bool offload, bool yield_cores, bool only_core, std::vector<int> cores) {
        ProgressOptions options;
        options.offload = offload;
        options.yield = yield_cores;
        options.only_core = only_core;
        options.cores = std::move(cores);
        ProgressEngine::instance().configure(std::move(options));
      },
      py::kw_only(), py::arg("offload"), py::arg("yield_cores"), py::arg("only_core"), py::arg("cores"),
      "How collectives are driven; before the first group is made.");
  module.def("offer_shared_memory", &ShmAllreduce::offer, py::arg("size"),
             "In rank 0: a descriptor of memory for the sums of `size` ranks of one host; -1 where it is not\n"
             "wanted or not to be had.  Keep it open until the group is made.");
  module.def("in_flight", [] { return ProgressEngine::instance().in_flight(); },
             "One line for each asynchronous collective that is not completed.");
  module.def(
      "shutdown",
      [] {
        py::gil_scoped_release release;
        return ProgressEngine::instance().shutdown();
      },
      "Ends all progress; true when nothing was in flight.");
  module.def("version", [] { return std::string(ccl::get_library_version().full); }, "oneCCL's version.");
}
