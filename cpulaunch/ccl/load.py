"""Loads the compiled group, and configures it and oneCCL for this rank."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import machinery, util
from pathlib import Path
from types import ModuleType

from cpulaunch.ccl import installed
from cpulaunch.ccl.core import Core
from cpulaunch.ccl.meeting import Peer
from cpulaunch.errors import HostError
from cpulaunch.plan.communication import Situation, communication_defaults

_MODULE = "cpulaunch.ccl._group"

PATIENCE = 10.0
"""Seconds that a failed rank waits for the other ranks to finalize MPI."""


@dataclass(frozen=True)
class Neighbours:
    """The numbers of hosts, ranks and CPUs around a rank, in the first group that was made."""

    hosts: int
    local_rank: int
    local_ranks: int
    most_local_ranks: int  # on the host with the most ranks
    cores: int  # CPUs that this rank may use
    oversubscribed: bool  # more ranks than CPUs on this host

    @classmethod
    def of(cls, rank: int, peers: Sequence[Peer]) -> Neighbours:
        """Compute the numbers for ``rank`` from all ranks' data."""
        hosts = [peer.host for peer in peers]
        here = [r for r, host in enumerate(hosts) if host == hosts[rank]]
        cpus = {cpu for r in here for cpu in peers[r].cpus}
        return cls(
            hosts=len(set(hosts)),
            local_rank=here.index(rank),
            local_ranks=len(here),
            most_local_ranks=max(hosts.count(host) for host in set(hosts)),
            cores=len(peers[rank].cpus),
            oversubscribed=len(here) > len(cpus),
        )


@dataclass(frozen=True)
class Loaded:
    """The compiled group in this process."""

    core: Core
    module: ModuleType  # torch's layer


@cache
def load_group() -> Loaded:
    """Load the compiled group.  Raises HostError if it does not load, or is not built for this torch."""
    there = installed.state()
    if there.problem or there.built is None:
        # The hint is in the message, as a rank's traceback may not show hints.
        raise HostError(
            f"the ccl process group cannot be used: {there.problem}. "
            "Run `cpulaunch ccl build` on this host, or use the backend gloo."
        )
    core = Core(there.built.core.file)  # before the layer, which links to the loaded library by its name
    return Loaded(core, load_layer(there.built.module))


def load_layer(path: Path) -> ModuleType:
    """Load torch's layer; the core must be loaded.  Raises HostError if it does not load."""
    loader = machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise HostError(f"the ccl process group in {path.parent} does not load: {error}",
                        hint="Build it again: `cpulaunch ccl build --force`.") from error  # fmt: skip
    sys.modules[_MODULE] = module
    return module


def oneccl_module() -> Path:
    """Return the path of the oneCCL module.  Raises HostError if it or the transport's library is missing."""
    there = installed.state()
    part = there.part("oneccl")
    if part is None:
        raise HostError(
            f"oneCCL cannot carry the collectives: {there.oneccl_problem}. "
            "Run `cpulaunch ccl build --oneccl` on this host, or use `--ccl-transport tcp`."
        )
    _demand_library(os.environ.get("CCL_ATL_TRANSPORT", "ofi"), os.environ)
    return part.file


def fabric_library(environ: Mapping[str, str]) -> str:
    """Return libfabric's path, or its name if it is a system library.  Raises HostError if it is missing."""
    _demand_library("ofi", environ)
    return environ.get("CCL_OFI_LIBRARY_PATH") or str(installed_library("libfabric.so.1") or "libfabric.so.1")


def _demand_library(transport: str, environ: Mapping[str, str]) -> None:
    """Raise HostError if the library of the transport (ofi or mpi) is missing."""
    what, name, variable = (
        ("Intel MPI", "libmpi.so.12", "CCL_MPI_LIBRARY_PATH")
        if transport == "mpi"
        else ("libfabric", "libfabric.so.1", "CCL_OFI_LIBRARY_PATH")
    )
    if environ.get(variable) or installed_library(name):
        return
    try:
        ctypes.CDLL(name)  # the system's library
    except OSError:
        raise HostError(
            f"the transport {transport} needs {what}, and there is no {name} here. "
            "`pip install 'cpulaunch[mpi]'` installs it, or use `--ccl-transport tcp`."
        ) from None


def settings(neighbours: Neighbours, environ: Mapping[str, str], *, bindings: bool = False) -> dict[str, str]:
    """Return variables for oneCCL that are not in ``environ``.

    They are those of `communication_defaults`, libraries' paths, and the rank on the host.  ``bindings``:
    oneCCL is the one in Intel's bindings.
    """
    # Workers have cores of their own if the planner or the user lists them.
    offload = environ.get("CCL_WORKER_AFFINITY", "auto") != "auto"
    situation = Situation(
        backend="ccl",
        hosts=neighbours.hosts,
        local_ranks=neighbours.most_local_ranks,
        comm_cores=1 if offload else 0,
        oversubscribed=neighbours.oversubscribed,
        intel_mpi="PMI_RANK" in environ,  # MPICH looks the same here
        transport=environ.get("CCL_ATL_TRANSPORT", "ofi"),
        provider=environ.get("FI_PROVIDER"),
        bindings=bindings,
    )
    wanted = communication_defaults(situation)
    if "LOCAL_RANK" not in environ or "LOCAL_WORLD_SIZE" not in environ:
        wanted |= {
            "CCL_PROCESS_LAUNCHER": "none",
            "CCL_LOCAL_RANK": str(neighbours.local_rank),
            "CCL_LOCAL_SIZE": str(neighbours.local_ranks),
        }
    if library := installed_library("libfabric.so.1"):
        wanted |= {"CCL_OFI_LIBRARY_PATH": str(library), "FI_PROVIDER_PATH": str(library.parent)}
        if situation.transport == "mpi":
            wanted["I_MPI_OFI_LIBRARY"] = str(library)  # otherwise, users would have to source Intel's script
    if situation.transport == "mpi" and (library := installed_library("libmpi.so.12")):
        wanted["CCL_MPI_LIBRARY_PATH"] = str(library)
    return {name: value for name, value in wanted.items() if name not in environ}


def set_up(module: ModuleType, neighbours: Neighbours) -> int:
    """Apply the settings before oneCCL starts.  Return this process's number of communication threads."""
    os.environ.update(settings(neighbours, os.environ))
    has_core = os.environ["CCL_WORKER_OFFLOAD"] == "1"
    cores = _worker_cores(os.environ, neighbours) if has_core else []
    module.configure(has_core=has_core, only_core=neighbours.cores == 1, cores=cores)
    return max(1, len(cores))


def installed_library(name: str) -> Path | None:
    """Return the path of a library in Intel MPI's wheel, or None if the wheel is not installed."""
    beside = Path(sys.prefix) / "lib" / name
    if beside.exists():
        return beside
    from importlib import metadata  # slow, and rarely needed

    try:
        files = metadata.files("impi-rt") or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())).resolve() for file in files if file.name == name)
    return next((path for path in paths if path.exists()), None)


def _worker_cores(environ: Mapping[str, str], neighbours: Neighbours) -> Sequence[int]:
    """Return this rank's cores in CCL_WORKER_AFFINITY, which lists those of all ranks of the host.

    Cores of an oversubscribed rank may be listed several times.
    """
    try:
        cores = [int(core) for core in environ.get("CCL_WORKER_AFFINITY", "").split(",")]
        count = int(environ.get("CCL_WORKER_COUNT", "1"))
    except ValueError:
        return []  # "auto" or ranges: the background thread is not pinned
    first = neighbours.local_rank * count
    return list(dict.fromkeys(cores[first : first + count]))


def leave_mpi(*, has_failed: bool) -> None:
    """Finalize MPI if oneCCL has initialized it.  Waits for the other ranks, which may end much later.

    oneCCL doesn't finalize MPI at the end of the process.  mpiexec would assume a crash, and kill the other
    ranks.
    """
    library = os.environ.get("CCL_MPI_LIBRARY_PATH")
    if os.environ.get("CCL_ATL_TRANSPORT") != "mpi" or not library:
        return
    mpi = ctypes.CDLL(library)
    entered, left = ctypes.c_int(), ctypes.c_int()
    mpi.MPI_Initialized(ctypes.byref(entered))
    mpi.MPI_Finalized(ctypes.byref(left))
    if entered and not left:
        thread = threading.Thread(target=mpi.MPI_Finalize, daemon=True)
        thread.start()
        thread.join(PATIENCE if has_failed else None)
