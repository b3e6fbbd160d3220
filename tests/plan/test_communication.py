"""The communication settings, as a table."""

from __future__ import annotations

import pytest

from cpulaunch.errors import PlanError
from cpulaunch.plan.communication import ALGORITHMS, Situation, communication_defaults, decide_transport

CCL = Situation(backend="ccl", hosts=1, local_ranks=2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"CCL_ATL_TRANSPORT": "ofi", "CCL_WORKER_OFFLOAD": "0", "CCL_ATL_SHM": "1", "FI_PROVIDER": "tcp"}),
        ({}, {"FI_TCP_IFACE": "lo", "GLOO_SOCKET_IFNAME": "lo", "CCL_KVS_IFACE": "lo", "CCL_YIELD": None}),
        ({"comm_cores": 1}, {"CCL_WORKER_OFFLOAD": "1", "CCL_WORKER_COUNT": "1"}),
        ({"comm_cores": 2, "worker_count": 2}, {"CCL_WORKER_COUNT": "2"}),
        ({"local_ranks": 1}, {"CCL_ATL_SHM": "0"}),
        ({"hosts": 2}, {"CCL_ATL_SHM": "1"}),
        ({"hosts": 2, "local_ranks": 1}, {"CCL_ATL_SHM": "0"}),
        ({"hosts": 2}, {"FI_TCP_IFACE": None, "GLOO_SOCKET_IFNAME": None}),
        ({"hosts": 2, "interface": "eth1"}, {"FI_TCP_IFACE": "eth1", "GLOO_SOCKET_IFNAME": "eth1"}),
        ({"hosts": 2, "interface": "ib0", "provider": "verbs"}, {"FI_PROVIDER": "verbs", "FI_VERBS_IFACE": "ib0"}),
        ({"hosts": 2, "interface": "eth0", "provider": "verbs", "card": "ib0"}, {"CCL_KVS_IFACE": "eth0", "FI_VERBS_IFACE": "ib0"}),
        ({"hosts": 2, "interface": "ib0", "provider": "psm3"}, {"FI_PROVIDER": "psm3", "FI_TCP_IFACE": None}),
        ({"hosts": 2, "provider": "verbs"}, {"RDMAV_FORK_SAFE": "1", "FI_EFA_FORK_SAFE": None}),
        ({"hosts": 2, "provider": "efa"}, {"RDMAV_FORK_SAFE": "1", "FI_EFA_FORK_SAFE": "1"}),
        ({"hosts": 2}, {"RDMAV_FORK_SAFE": None, "TORCH_GLOO_LAZY_INIT": None}),
        ({"hosts": 8, "local_ranks": 8}, {"TORCH_GLOO_LAZY_INIT": None}),
        ({"hosts": 13, "local_ranks": 5}, {"TORCH_GLOO_LAZY_INIT": "1"}),
        ({"hosts": 65, "local_ranks": 1, "backend": "gloo"}, {"TORCH_GLOO_LAZY_INIT": "1"}),
        ({"oversubscribed": True}, {"CCL_YIELD": "sched_yield", "I_MPI_THREAD_YIELD": None}),
        ({"transport": "mpi", "intel_mpi": True}, {"CCL_PROCESS_LAUNCHER": "hydra", "FI_PROVIDER": None}),
        ({"transport": "mpi", "intel_mpi": True}, {"I_MPI_THREAD_SPLIT": "0"}),
        ({"transport": "mpi", "intel_mpi": True, "worker_count": 2}, {"I_MPI_THREAD_SPLIT": None}),
        ({"transport": "mpi", "intel_mpi": True, "oversubscribed": True}, {"I_MPI_THREAD_YIELD": "3"}),
        ({"backend": "gloo"}, {"GLOO_SOCKET_IFNAME": "lo", "CCL_WORKER_COUNT": None, "FI_PROVIDER": None}),
    ],
    ids=str,
)  # fmt: skip
def test_defaults(change: dict[str, object], expected: dict[str, str | None]) -> None:
    variables = communication_defaults(CCL._replace(**change))  # type: ignore[arg-type]
    assert {name: variables.get(name) for name in expected} == expected
    assert "CCL_WORKER_AFFINITY" not in variables


def test_an_unknown_transport_is_named() -> None:
    with pytest.raises(PlanError, match="udp"):
        communication_defaults(CCL._replace(transport="udp"))


def test_transport_mpi_requires_intel_mpi() -> None:
    with pytest.raises(PlanError, match="needs ranks that Intel MPI starts"):
        communication_defaults(CCL._replace(transport="mpi"))


JOB = {
    "requested": "auto",
    "hosts": 1,
    "local_ranks": 2,
    "provider": None,
    "worker_count": 1,
    "user_variables": {},
}
OVER_VERBS = {"hosts": 2, "provider": "verbs"}
RING = {"CCL_ALLREDUCE": "ring"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "shm"),
        ({"local_ranks": 1}, "shm"),
        ({"hosts": 2}, "shm+tcp"),
        ({"hosts": 2, "local_ranks": 1}, "tcp"),
        ({"hosts": 2, "provider": "tcp"}, "shm+tcp"),
        ({"worker_count": 0}, "shm"),
        # over fast cards, and by oneCCL if its settings are used
        (OVER_VERBS, "shm+ofi"),
        ({**OVER_VERBS, "local_ranks": 1}, "ofi"),
        ({**OVER_VERBS, "worker_count": 2}, "oneccl"),
        ({**OVER_VERBS, "user_variables": RING}, "oneccl"),
        ({"provider": "verbs"}, "shm"),  # no card is needed within a host
        ({"worker_count": 2}, "oneccl"),
        ({"user_variables": RING}, "oneccl"),
        *(({"user_variables": {name: "ring"}}, "oneccl") for name in ALGORITHMS),
        *(({**OVER_VERBS, "user_variables": {name: "ring"}}, "oneccl") for name in ALGORITHMS),
        ({"user_variables": {"CCL_ALLREDUCE": ""}}, "shm"),
        ({"user_variables": {"CCL_ATL_TRANSPORT": "ofi"}}, "shm"),
        ({"hosts": 2, "user_variables": {"CCL_ATL_TRANSPORT": "ofi"}}, "shm+ofi"),
        ({"user_variables": {"CCL_ATL_TRANSPORT": "ofi", **RING}}, "oneccl"),
        ({"user_variables": {"CCL_ATL_TRANSPORT": "mpi", **RING}}, "mpi"),
        ({"user_variables": {"CCL_ATL_TRANSPORT": ""}}, "shm"),
        # explicit requests
        ({"requested": "ofi"}, "shm"),
        ({"requested": "oneccl"}, "oneccl"),
        ({"requested": "ofi", "hosts": 2}, "shm+ofi"),
        ({"requested": "ofi", "hosts": 2, "local_ranks": 1}, "ofi"),
        ({"requested": "ofi", "hosts": 2, "worker_count": 2}, "oneccl"),
        ({"requested": "ofi", "hosts": 2, "user_variables": RING}, "oneccl"),
        ({"requested": "mpi", "hosts": 2}, "mpi"),
        ({"requested": "ofi", "user_variables": {"CCL_ATL_TRANSPORT": "mpi"}}, "shm"),
        ({"requested": "tcp"}, "shm"),
        ({"requested": "tcp", **OVER_VERBS}, "shm+tcp"),
        ({"requested": "tcp", **OVER_VERBS, "local_ranks": 1}, "tcp"),
        ({"requested": "tcp", "worker_count": 2, "user_variables": {"CCL_ATL_TRANSPORT": "ofi", **RING}}, "shm"),
        # a group of some of the job's ranks, which got the job's transport
        ({"requested": "shm+tcp"}, "shm"),
        ({"requested": "shm+tcp", "hosts": 2, "local_ranks": 1}, "tcp"),
        ({"requested": "shm", "hosts": 2}, "shm+tcp"),
        ({"requested": "shm+ofi", "hosts": 2}, "shm+ofi"),
        ({"requested": "shm+ofi", "hosts": 2, "local_ranks": 1}, "ofi"),
        ({"requested": "shm+ofi"}, "shm"),
        ({"requested": "tcp", "worker_count": 2}, "shm"),
    ],
    ids=str,
)  # fmt: skip
def test_the_transport_of_collectives_on_ccl(change: dict[str, object], expected: str) -> None:
    assert decide_transport(**{**JOB, **change}) == expected  # type: ignore[arg-type]
