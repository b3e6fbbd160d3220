// The Python module `_group`.

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "group.hpp"

namespace py = pybind11;
using namespace cpulaunch;

// torch keeps its objects in this holder; the group is registered as a subclass of its Backend.
template <class T>
using Holder = c10::intrusive_ptr<T>;

namespace {

template <size_t size>
py::object text_in(const char (&field)[size]) {
  return py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(field, strnlen(field, size), "replace"));
}

// Returns the fields of cpulaunch.cause.Cause that are known.
py::dict in_python(const Cause& cause) {
  py::dict fields;
  const auto add = [&](const char* name, bool is_known, const auto& value) {
    if (is_known) fields[name] = value;
  };
  const auto &theirs = cause.theirs, &own = cause.own;
  fields["kind"] = kCauseNames[std::min<size_t>(cause.kind, std::size(kCauseNames) - 1)];
  add("rank", cause.rank >= 0, cause.rank);
  add("finder", cause.finder >= 0, cause.finder);
  add("host", cause.host[0] != 0, text_in(cause.host));
  add("operation", cause.operation[0] != 0, text_in(cause.operation));
  add("sequence", cause.operation[0] != 0, cause.sequence);
  add("timeout", cause.timeout != 0, cause.timeout / 1e3);
  add("seconds", cause.milliseconds != 0, cause.milliseconds / 1e3);
  add("detail", cause.detail[0] != 0, text_in(cause.detail));
  if (own.kind[0]) {
    add("operations", true, py::make_tuple(text_in(theirs.kind), text_in(own.kind)));
    add("sizes", theirs.bytes >= 0 && own.bytes >= 0, py::make_tuple(theirs.bytes, own.bytes));
    add("roots", theirs.root >= 0 && own.root >= 0, py::make_tuple(theirs.root, own.root));
    add("reductions", theirs.reduction[0] && own.reduction[0],
        py::make_tuple(text_in(theirs.reduction), text_in(own.reduction)));
  }
  add("sizes", cause.is(CauseKind::sizes_differ), py::make_tuple(cause.bytes, cause.expected));
  return fields;
}

}  // namespace

PYBIND11_MODULE(_group, module) {
  module.doc() = "cpulaunch's process group for torch.";
  py::module_::import("torch._C._distributed_c10d");  // the base class

  py::class_<ProcessGroupCCL, Holder<ProcessGroupCCL>, c10d::Backend>(module, "ProcessGroupCCL")
      .def(py::init([](Holder<c10d::Store> store, int rank, int size, double timeout, std::string name,
                       std::vector<int> numbers, const std::string& in_ledger, std::vector<std::string> host_names,
                       bool crowded, bool shares_cores, int cores,
                       const std::vector<std::pair<int, int>>& local_peers,
                       std::tuple<std::string, std::string, std::string, std::string> heartbeat, double store_interval,
                       double silence, uintptr_t carrier, py::function make_gloo) {
             std::vector<Peer> peers;
             for (const auto& [peer, pid] : local_peers) peers.push_back({peer, pid});
             auto [own_key, own_ip, next_key, next_host] = std::move(heartbeat);
             // The function outlives the group's Python object, and is released while the GIL is held.
             std::shared_ptr<py::function> function(new py::function(std::move(make_gloo)), [](py::function* held) {
               py::gil_scoped_acquire acquire;
               delete held;
             });
             auto* taken = reinterpret_cast<cl_carrier*>(carrier);
             ProcessGroupCCL::Carrier its_carrier(taken, taken->destroy);
             py::gil_scoped_release release;
             return c10::make_intrusive<ProcessGroupCCL>(
                 std::move(store), rank, size, Milliseconds(static_cast<int64_t>(timeout * 1e3)), std::move(name),
                 Members(std::move(numbers), std::move(host_names)), in_ledger, Pace{crowded, shares_cores, cores},
                 std::move(peers),
                 Heartbeat{std::move(own_key), std::move(own_ip), std::move(next_key), std::move(next_host)},
                 StoreIntervals(Milliseconds(static_cast<int64_t>(store_interval * 1e3)),
                                Milliseconds(static_cast<int64_t>(silence * 1e3))),
                 std::move(its_carrier),
                 [function] {
                   py::gil_scoped_acquire acquire;
                   return (*function)().cast<Holder<c10d::Backend>>();
                 });
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("timeout"), py::arg("name"),
           py::arg("numbers"), py::arg("in_ledger"), py::arg("host_names"), py::arg("crowded"), py::arg("shares_cores"),
           py::arg("cores"), py::arg("local_peers"),
           py::arg("heartbeat"), py::arg("store_interval"), py::arg("silence"), py::arg("carrier"),
           py::arg("make_gloo"),
           "Connects the ranks by a cl_carrier of the core's, at the address `carrier`, which is taken over.\n"
           "`numbers` are the ranks' in the job, `in_ledger` is how the ledger has those, and `host_names` are the\n"
           "names of their hosts, empty where there is one; `crowded`: more ranks of this host than cores run on\n"
           "this rank's, and `shares_cores`: ranks of other hosts, simulated on this machine, do;\n"
           "`cores`: how many this rank has if the ranks of its host share them evenly;\n"
           "`local_peers` are (rank, pid) of the others on this host, `timeout` is in seconds,\n"
           "`heartbeat` is (key to write, this host's address, key to read, name of the host that writes that),\n"
           "empty for none;\n"
           "`store_interval` is how many seconds lie between two looks of a waiting rank into the store, and\n"
           "`silence` after how many, at the earliest, a host that says nothing counts as gone;\n"
           "`make_gloo` makes the gloo group of the same ranks, when it is first needed.")
      .def("get_error", &ProcessGroupCCL::getError,
           "What kind of failure the group has had: a timeout of this rank, one that another rank reports, or another.")
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

  module.def(
      "configure",
      [](bool has_core, bool only_core, std::vector<int> cores) {
        ProgressOptions options;
        options.has_core = has_core;
        options.only_core = only_core;
        options.cores = std::move(cores);
        ProgressEngine::instance().configure(std::move(options));
      },
      py::kw_only(), py::arg("has_core"), py::arg("only_core"), py::arg("cores"),
      "How collectives are driven; once, before the first group is made.");
  ProgressEngine::instance().set_signal_handling([] {
    if (syscall(SYS_gettid) != getpid()) return;  // Python handles signals only in its main thread
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
  module.def(
      "open_ledger",
      [](const py::buffer& mapping) {
        // The buffer is held forever, so the mapping can't be closed.
        const auto* buffer = new py::buffer_info(mapping.request(/*writable=*/true));
        TORCH_CHECK(static_cast<size_t>(buffer->size * buffer->itemsize) == ledger::kSize, "not a ledger");
        ledger::open(buffer->ptr);
      },
      py::arg("mapping"), "Begin to write this process's ledger (cpulaunch/ledger.py).");
  module.attr("CAUSES") = py::cast(std::vector<std::string>(std::begin(kCauseNames) + 1, std::end(kCauseNames)));
  module.def(
      "cause_of",
      [](const std::string& error) {
        const auto cause = cause_of(error);
        return cause.empty() ? py::object(py::none()) : py::object(in_python(cause));
      },
      py::arg("error"), "What an exception with this text was raised for: known fields of cpulaunch.cause.Cause.\n"
                        "None where it is none of this process's last ones.");
  module.def("in_flight", [] { return ProgressEngine::instance().in_flight(); },
             "One line for each asynchronous collective that is not completed.");
  module.def("check_calls", &ProcessGroupCCL::check_all_calls, py::call_guard<py::gil_scoped_release>(),
             "Throws DistBackendError where ranks are known to have called different collectives of a group that is\n"
             "still open, though none of this rank's has failed.");
  module.def(
      "shutdown",
      [](bool has_failed) {
        py::gil_scoped_release release;
        const bool has_ended = ProgressEngine::instance().shutdown(has_failed);
        if (has_ended && !has_failed) ProcessGroupCCL::leave_all();
        return has_ended;
      },
      py::arg("has_failed"), "Ends all progress; true when nothing was in flight.");
}
