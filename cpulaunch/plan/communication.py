"""Defaults for oneCCL, libfabric and gloo, as a pure function of what is known about a rank.

The plan shows them; the ccl process group applies those that are still unset, so a script under torchrun gets
the same.  A variable that the user has set always wins.  Not included: ``CCL_WORKER_AFFINITY``, which the
planner sets (one flat list for all ranks of a host), and the paths of libraries and providers, which each
process finds on its own host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cpulaunch.errors import PlanError

BACKENDS = ("ccl", "gloo")
TRANSPORTS = ("ofi", "mpi")
"""oneCCL's transports."""
ALGORITHMS = (
    "CCL_ALLGATHERV", "CCL_ALLREDUCE", "CCL_ALLTOALLV", "CCL_BCAST", "CCL_REDUCE", "CCL_REDUCE_SCATTER",
)  # fmt: skip
"""Variables that name oneCCL's algorithm for a collective that the group uses."""

FORK_SAFE = {
    "verbs": {"RDMAV_FORK_SAFE": "1"},
    "psm3": {"RDMAV_FORK_SAFE": "1"},
    "efa": {"RDMAV_FORK_SAFE": "1", "FI_EFA_FORK_SAFE": "1"},
}
"""By libfabric's provider: without these, memory that a card has registered is lost when a process forks, as
for DataLoader's workers (ibv_fork_init(3), fi_efa(7)).  Kernels from 5.12 on no longer need them."""
MOST_CONNECTED = 64
"""Maximum ranks with which gloo connects each rank to every other when it makes a group.  Larger jobs would
need a thousand descriptors per rank.  If gloo connects at the first send instead, a group takes longer to
notice a missing rank (monitored_barrier 60 s, torch 2.13)."""


def decide_transport(
    requested: str,
    *,
    hosts: int,
    local_ranks: int,
    provider: str | None,
    worker_count: int,
    user_variables: Mapping[str, str],
) -> str:
    """Choose the transport of ccl's collectives, for the planner and for a rank's own group.

    All are cpulaunch's own, except ``oneccl`` (over libfabric) and ``mpi``, with which oneCCL carries
    everything: ``shm`` is shared memory within a host, and ``tcp`` or ``ofi`` (libfabric) connects hosts.
    ``requested`` is the setting's value, or this function's result for the whole job.  ``local_ranks`` is the
    number of ranks on the host with the most.  ``user_variables`` is the environment as the user has set it,
    without cpulaunch's additions.
    """
    tunes_oneccl = worker_count > 1 or any(user_variables.get(name) for name in ALGORITHMS)
    if requested == "auto":
        on_fabric = hosts > 1 and provider not in (None, "tcp")
        own = "ofi" if on_fabric else "tcp"
        requested = user_variables.get("CCL_ATL_TRANSPORT") or ("oneccl" if tunes_oneccl else own)
    if requested == "ofi" and tunes_oneccl:
        return "oneccl"
    if needs_oneccl(requested):
        return requested
    if hosts == 1:
        return "shm"
    network = "ofi" if needs_libfabric(requested) else "tcp"
    return f"shm+{network}" if local_ranks > 1 else network


def needs_oneccl(transport: str) -> bool:
    """Return whether a transport of `decide_transport` needs the module with oneCCL in it."""
    return transport in ("oneccl", "mpi")


def needs_libfabric(transport: str) -> bool:
    """Return whether cpulaunch's own transport sends between hosts through libfabric."""
    return transport in ("ofi", "shm+ofi")


class Situation(NamedTuple):
    """What is known about a rank when its communication is set up."""

    backend: str  # one of BACKENDS
    hosts: int
    local_ranks: int  # on the host with the most
    comm_cores: int = 0  # physical cores set aside for communication (0: none)
    worker_count: int = 1  # oneCCL's worker threads
    oversubscribed: bool = False  # more ranks than cores
    intel_mpi: bool = False  # Intel MPI starts the ranks
    transport: str = "ofi"  # one of TRANSPORTS
    provider: str | None = None  # libfabric's; None: cpulaunch chooses
    interface: str | None = None  # network interface that routes to the master, if known
    card: str | None = None  # network interface of the card that the provider drives, if known
    bindings: bool = False  # the oneCCL of Intel's oneccl_bind_pt
    ports: range | None = None  # to listen on; None: any free ones


def communication_defaults(situation: Situation) -> dict[str, str]:
    """Return variables for a rank in this situation: ``CCL_*``, ``FI_*``, ``GLOO_*``, ``I_MPI_*``.

    Raises PlanError for a backend or transport that does not exist, or that the launcher doesn't support.
    """
    if situation.backend not in BACKENDS:
        raise PlanError(f"no backend {situation.backend!r}", hint=f"Valid: {', '.join(BACKENDS)}.")
    if situation.transport not in TRANSPORTS:
        raise PlanError(f"no transport {situation.transport!r}", hint=f"Valid: {', '.join(TRANSPORTS)}.")
    if situation.backend == "ccl" and situation.transport == "mpi" and not situation.intel_mpi:
        # oneCCL itself would silently use ofi.
        raise PlanError(
            "oneCCL's transport mpi needs ranks that Intel MPI starts",
            hint="--mpi intel (`pip install 'cpulaunch[mpi]'` brings it), or --ccl-transport ofi",
        )
    variables: dict[str, str] = {}
    if situation.backend == "ccl":
        variables |= _oneccl(situation)
        if situation.transport == "ofi":
            variables["FI_PROVIDER"] = situation.provider or "tcp"
            variables |= FORK_SAFE.get(variables["FI_PROVIDER"], {})
    if situation.ports:
        variables["FI_TCP_PORT_LOW_RANGE"] = str(situation.ports[0])
        variables["FI_TCP_PORT_HIGH_RANGE"] = str(situation.ports[-1])
    if situation.hosts * situation.local_ranks > MOST_CONNECTED:
        variables["TORCH_GLOO_LAZY_INIT"] = "1"
    if interface := situation.interface or ("lo" if situation.hosts == 1 else None):
        variables |= interface_variables(interface, variables.get("FI_PROVIDER"), situation.card)
    return variables


def interface_variables(interface: str, provider: str | None, card: str | None = None) -> dict[str, str]:
    """Return variables that name a host's ``interface`` to the others, also for libfabric's ``provider``.

    ``card`` is the network interface of the provider's card, if it has its own.
    """
    # A ccl group falls back on torch's gloo for what oneCCL lacks, so gloo's interface is named for every
    # backend.
    variables = {"GLOO_SOCKET_IFNAME": interface}
    if provider:
        # Otherwise, oneCCL and libfabric take the first interface that is not loopback, and wait forever if
        # it is the wrong one (uxlfoundation/oneCCL#209).
        variables["CCL_KVS_IFACE"] = interface
    if provider == "tcp":
        variables["FI_TCP_IFACE"] = interface
    elif provider == "verbs":
        variables["FI_VERBS_IFACE"] = card or interface
    return variables


def _oneccl(situation: Situation) -> dict[str, str]:
    # The oneCCL of Intel's bindings needs workers for asynchronous operations that nobody waits for.
    offload = situation.comm_cores > 0 or situation.bindings
    variables = {
        "CCL_ATL_TRANSPORT": situation.transport,
        "CCL_WORKER_COUNT": str(situation.worker_count),
        # A worker thread that polls on the rank's only cores steals from its computation: a 4 KB allreduce
        # then takes 9 ms instead of 13 us.  Without cores for workers, the calling thread makes progress.
        "CCL_WORKER_OFFLOAD": "1" if offload else "0",
        # Rank and size on the host come from LOCAL_RANK and LOCAL_WORLD_SIZE, which agents and torchrun set.
        # Only oneCCL's MPI transport has to ask the MPI launcher.
        "CCL_PROCESS_LAUNCHER": "hydra" if situation.transport == "mpi" else "torchrun",
        # oneCCL's warnings (topology, missing GPU drivers, affinity) concern nothing that the user asked for.
        "CCL_LOG_LEVEL": "error",
    }
    if situation.transport == "ofi":
        # Shared memory triples the speed within a host, if there are other ranks to share it with.  All ranks
        # must use the same value, even those that are alone on their host: otherwise oneCCL doesn't start.
        variables["CCL_ATL_SHM"] = "1" if situation.local_ranks > 1 else "0"
    elif situation.transport == "mpi":
        # By default, each rank chooses by its own data, which differ: in and after a scatter of 8 MB, some
        # ranks waited forever (oneCCL 2022.2.0).
        variables["CCL_ALLTOALLV"] = "scatter"
    if situation.oversubscribed or (situation.bindings and situation.comm_cores == 0):
        # By default, a worker that shares a core polls for its whole time slice (oneCCL 2021.14.1).
        variables["CCL_YIELD"] = "sched_yield"
        if situation.transport == "mpi":
            variables["I_MPI_THREAD_YIELD"] = "3"
    return variables
