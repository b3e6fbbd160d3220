"""Finds and loads the compiled group, and configures it and oneCCL for this rank."""

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
"""Seconds that the other ranks have to finish after this rank has failed."""


@dataclass(frozen=True)
class Neighbours:
    """The ranks around this one, from the data exchanged when the first group was made."""

    hosts: int
    local_rank: int
    local_ranks: int
    most_local_ranks: int  # on the host with the most
    cores: int  # CPUs that this rank may use
    oversubscribed: bool  # more ranks than CPUs on this host

    @classmethod
    def of(cls, rank: int, peers: Sequence[Peer]) -> Neighbours:
        """Return the neighbours of ``rank``, from all ranks' own data."""
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
    """Load and return the compiled group.

    Raises HostError if it is not built for the installed torch or does not load.
    """
    there = installed.state()
    if there.problem or there.built is None:
        # A rank's traceback would not show a hint.
        raise HostError(
            f"the ccl process group cannot be used: {there.problem}. "
            "Run `cpulaunch ccl build` on this host, or take the backend gloo."
        )
    core = Core(there.built.core.file)  # first: the layer links to whatever library has its name
    return Loaded(core, load_layer(there.built.module))


def load_layer(path: Path) -> ModuleType:
    """Load torch's layer from this file, after the core.  Raises HostError if it does not load."""
    loader = machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise HostError(f"the ccl process group in {path.parent} does not load: {error}",
                        hint="Build it anew: `cpulaunch ccl build --force`.") from error  # fmt: skip
    sys.modules[_MODULE] = module
    return module


def oneccl_module() -> Path:
    """Return the library with oneCCL in it.  Raises HostError if there is none for this host."""
    there = installed.state()
    part = there.part("oneccl")
    if part is None:
        raise HostError(
            f"oneCCL cannot carry the collectives: {there.oneccl_problem}. "
            "Run `cpulaunch ccl build --oneccl` on this host, or take `--ccl-transport tcp`."
        )
    _demand_library(os.environ.get("CCL_ATL_TRANSPORT", "ofi"), os.environ)
    return part.file


def fabric_library(environ: Mapping[str, str]) -> str:
    """Return libfabric's path, or its name if the system has it.  Raises HostError if it is missing."""
    _demand_library("ofi", environ)
    return environ.get("CCL_OFI_LIBRARY_PATH") or str(installed_library("libfabric.so.1") or "libfabric.so.1")


def _demand_library(transport: str, environ: Mapping[str, str]) -> None:
    """Raise HostError if the library is missing that this transport, ofi or mpi, sends through."""
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
            "`pip install 'cpulaunch[mpi]'` brings it, or take `--ccl-transport tcp`."
        ) from None


def settings(neighbours: Neighbours, environ: Mapping[str, str], *, bindings: bool = False) -> dict[str, str]:
    """Return the variables that oneCCL (ours, or that of Intel's ``bindings``) needs here and that are unset.

    They are the defaults of `communication_defaults`, and variables that only this process knows: libraries'
    paths, and its rank on the host.
    """
    # Workers have cores of their own if the planner, or the user, names these cores.
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
            wanted["I_MPI_OFI_LIBRARY"] = str(library)  # else users would have to source Intel's script
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
    """Return a library of Intel MPI's wheel in this environment; None to leave it to the system."""
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
    """Return this rank's part of CCL_WORKER_AFFINITY, one flat list for all ranks of the host.

    An oversubscribed rank may have each of its cores several times there.
    """
    try:
        cores = [int(core) for core in environ.get("CCL_WORKER_AFFINITY", "").split(",")]
        count = int(environ.get("CCL_WORKER_COUNT", "1"))
    except ValueError:
        return []  # "auto", or ranges: the background thread then runs anywhere
    first = neighbours.local_rank * count
    return list(dict.fromkeys(cores[first : first + count]))


def leave_mpi(*, has_failed: bool) -> None:
    """Finalize this process's MPI together with the other ranks, if oneCCL has initialized one.

    oneCCL doesn't do so when the process ends; mpiexec would then assume a crash and kill the other ranks.
    The other ranks may arrive much later, for example because they save.
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
