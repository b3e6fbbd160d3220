"""Default variables of oneCCL, libfabric and gloo.

The planner puts them into the plan.  The process group ``ccl`` sets those that are unset, so a script under
torchrun gets the same defaults.  A variable that the user has set always wins.

Two kinds of variables are set elsewhere.  The planner sets ``CCL_WORKER_AFFINITY``, a list of CPUs for all
ranks of a host.  Each process finds the paths of libraries and providers on its own host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cpulaunch.errors import PlanError

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
"""libfabric's provider → variables that let a process fork, as DataLoader does.  Before Linux 5.12, a fork
without them loses the memory that a card has registered (ibv_fork_init(3), fi_efa(7))."""
MOST_CONNECTED = 64
"""Maximum number of ranks that gloo connects with each other when it makes a group.  In a larger job, each
rank would need a thousand descriptors, so gloo connects at the first send.  Then a group notices a missing
rank later (after 60 s in monitored_barrier, torch 2.13)."""


def decide_transport(
    requested: str,
    *,
    hosts: int,
    local_ranks: int,
    provider: str | None,
    worker_count: int,
    user_variables: Mapping[str, str],
) -> str:
    """Choose the transport of ccl's collectives: for a job in the planner, or for one group in a rank.

    cpulaunch's own transports are ``shm`` (shared memory) within a host, and ``tcp`` or ``ofi`` (libfabric)
    between hosts.  With ``oneccl`` (over libfabric) and ``mpi``, oneCCL carries all collectives.

    ``requested`` is the setting's value, or the result of this function for the job.  ``local_ranks`` is the
    number of ranks on the host with the most ranks.  ``user_variables`` has only the user's own variables.
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
    """Return whether oneCCL carries the collectives of ``transport``, a result of `decide_transport`."""
    return transport in ("oneccl", "mpi")


def needs_libfabric(transport: str) -> bool:
    """Return whether ``transport``, a result of `decide_transport`, is cpulaunch's own over libfabric."""
    return transport in ("ofi", "shm+ofi")


class Situation(NamedTuple):
    """A rank's surroundings, on which its variables depend."""

    backend: str  # ccl or gloo
    hosts: int
    local_ranks: int  # on the host with the most ranks
    comm_cores: int = 0  # physical cores set aside for communication (0: none)
    worker_count: int = 1  # oneCCL's worker threads
    oversubscribed: bool = False  # more ranks than cores
    intel_mpi: bool = False  # Intel MPI starts the ranks
    transport: str = "ofi"  # one of TRANSPORTS
    provider: str | None = None  # libfabric's; None: cpulaunch chooses
    interface: str | None = None  # network interface towards the master, if known
    card: str | None = None  # network interface of the provider's card, if known
    bindings: bool = False  # oneCCL is the one in Intel's oneccl_bind_pt
    ports: range | None = None  # on which to listen; None: any free port


def communication_defaults(situation: Situation) -> dict[str, str]:
    """Return variables for a rank in this situation: ``CCL_*``, ``FI_*``, ``GLOO_*``, ``I_MPI_*``.

    Raises PlanError for an unknown transport, or if the launcher doesn't support the transport.
    """
    if situation.transport not in TRANSPORTS:
        raise PlanError(f"no transport {situation.transport!r}", hint=f"Valid: {', '.join(TRANSPORTS)}.")
    if situation.backend == "ccl" and situation.transport == "mpi" and not situation.intel_mpi:
        # oneCCL would silently use ofi instead.
        raise PlanError(
            "oneCCL's transport mpi needs ranks that Intel MPI starts",
            hint="--mpi intel (`pip install 'cpulaunch[mpi]'` installs it), or --ccl-transport ofi",
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
    """Return variables that select a host's network ``interface``.

    ``provider`` is libfabric's, and ``card`` is the network interface of its card, if the card has one.
    """
    # With every backend: a ccl group uses gloo for operations that oneCCL lacks.
    variables = {"GLOO_SOCKET_IFNAME": interface}
    if provider:
        # By default, oneCCL and libfabric use the first interface that is not loopback.  If it is the wrong
        # one, they wait forever (uxlfoundation/oneCCL#209).
        variables["CCL_KVS_IFACE"] = interface
    if provider == "tcp":
        variables["FI_TCP_IFACE"] = interface
    elif provider == "verbs":
        variables["FI_VERBS_IFACE"] = card or interface
    return variables


def _oneccl(situation: Situation) -> dict[str, str]:
    # In Intel's bindings, only workers complete asynchronous operations that no thread waits for.
    offload = situation.comm_cores > 0 or situation.bindings
    variables = {
        "CCL_ATL_TRANSPORT": situation.transport,
        "CCL_WORKER_COUNT": str(situation.worker_count),
        # If workers have no cores of their own, the calling thread makes progress.  A worker would poll on
        # the cores of the computation: a 4 KB allreduce would take 9 ms instead of 13 us.
        "CCL_WORKER_OFFLOAD": "1" if offload else "0",
        # Rank and size on the host come from LOCAL_RANK and LOCAL_WORLD_SIZE, which agents and torchrun set.
        # Only oneCCL's MPI transport has to ask the MPI launcher.
        "CCL_PROCESS_LAUNCHER": "hydra" if situation.transport == "mpi" else "torchrun",
        # oneCCL's warnings are about topology, missing GPU drivers and affinity, which users can ignore.
        "CCL_LOG_LEVEL": "error",
    }
    if situation.transport == "ofi":
        # Shared memory triples the speed within a host.  All ranks must have the same value, also a rank that
        # is alone on its host: otherwise oneCCL doesn't start.
        variables["CCL_ATL_SHM"] = "1" if situation.local_ranks > 1 else "0"
    elif situation.transport == "mpi":
        # By default, each rank chooses an algorithm by the size of its own data.  If ranks choose different
        # algorithms, they wait forever, as in a scatter of 8 MB (oneCCL 2022.2.0).
        variables["CCL_ALLTOALLV"] = "scatter"
        if situation.worker_count == 1:
            # oneCCL would set 1 in ranks with several OpenMP threads.  If only some have several, MPI_Init
            # fails: "Missing hostname ... in business card" (Intel MPI 2021.18.1).
            variables["I_MPI_THREAD_SPLIT"] = "0"
    if situation.oversubscribed or (situation.bindings and situation.comm_cores == 0):
        # By default, a worker that shares a core polls for its whole time slice (oneCCL 2021.14.1).
        variables["CCL_YIELD"] = "sched_yield"
        if situation.transport == "mpi":
            variables["I_MPI_THREAD_YIELD"] = "3"
    return variables
