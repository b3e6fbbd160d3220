"""Find out which other launcher started this process, and its rank, from the environment.

Variables of an allocation are ignored, because they are also set in a batch shell, which is no rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cpulaunch import variables
from cpulaunch.errors import UsageError
from cpulaunch.launchers.hydra import INTEL
from cpulaunch.launchers.openmpi import OPENMPI
from cpulaunch.launchers.srun import SRUN
from cpulaunch.model.hosts import parse_hosts
from cpulaunch.plan.placement import IdentityVariables


class OtherLauncher(NamedTuple):
    """A program that starts ranks, and the names of the variables that it sets; empty if it sets none."""

    title: str
    identity: IdentityVariables
    hosts: str = ""  # number of hosts
    nodes: str = ""  # list of hosts, which begins with rank 0's host
    unordered: tuple[str, str] = ("", "")  # variable and value with which ``nodes`` has another order
    start: tuple[str, ...] = ()  # variables that together identify a start


OTHERS = (
    OtherLauncher("mpiexec of Open MPI", OPENMPI.identity),
    OtherLauncher(
        "jsrun",
        IdentityVariables(
            "JSM_NAMESPACE_RANK",
            "JSM_NAMESPACE_SIZE",
            "JSM_NAMESPACE_LOCAL_RANK",
            "JSM_NAMESPACE_LOCAL_SIZE",
        ),
    ),
    OtherLauncher(
        "mpirun of MVAPICH",
        IdentityVariables(
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    OtherLauncher(
        "mpiexec of PALS",
        IdentityVariables("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    ),
    OtherLauncher("mpiexec of Intel MPI or MPICH", INTEL.identity),
    OtherLauncher(
        "Flux",
        IdentityVariables("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
        hosts="FLUX_JOB_NNODES",
        start=("FLUX_JOB_ID",),
    ),
    OtherLauncher(
        "srun",
        SRUN.identity,
        hosts="SLURM_STEP_NUM_NODES",
        nodes="SLURM_STEP_NODELIST",
        unordered=("SLURM_DISTRIBUTION", "arbitrary"),
        start=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)
"""The innermost launcher first: mpiexec may use srun to start its processes, but srun never uses mpiexec."""

HINT = (
    "`cpulaunch run` starts the ranks itself; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set for each of "
    f"them, let them join; with {variables.SEPARATE}=1 each process trains a model of its own"
)
"""The hint if the ranks can't join each other."""

_WITHOUT_SIZE = ("PALS_RANKID", "PMIX_RANK")
"""Variables with the rank that may be set without the number of ranks."""


class Started(NamedTuple):
    """This process's rank, as another launcher has set it."""

    launcher: OtherLauncher
    rank: int
    size: int
    local_rank: int | None  # None if the launcher doesn't set it
    local_size: int | None  # None if the launcher doesn't set it

    def first_host(self, environ: Mapping[str, str]) -> str:
        """The host of rank 0; empty if unknown.  Raises ConfigError if the list of nodes is malformed."""
        if self.local_size == self.size:
            return "127.0.0.1"
        name, (variable, value) = self.launcher.nodes, self.launcher.unordered
        if not environ.get(name) or environ.get(variable) == value:
            return ""
        return parse_hosts(environ[name], f"${name}")[0].name

    def __str__(self) -> str:
        return f"{self.launcher.title} started this process as rank {self.rank} of {self.size}"


def started_as(environ: Mapping[str, str]) -> Started | None:
    """This process's rank from another launcher; None if there is no launcher, or only one rank.

    Raises UsageError if the variables contradict each other, or if only the rank is set.
    """
    found = [started for launcher in OTHERS if (started := _started_by(launcher, environ))]
    if not found:
        if name := next((name for name in _WITHOUT_SIZE if name in environ), ""):
            raise UsageError(
                f"another launcher started this process ({name}={environ[name]}), but no variable has the "
                "number of ranks",
                hint=HINT,
            )
        return None
    # Slurm's PMI also sets variables of an MPI.  Then prefer the variables of srun, which say more.
    innermost = found[0]
    same = [started for started in found if started[1:3] == innermost[1:3]]
    return same[-1] if innermost.size > 1 else None


def _started_by(launcher: OtherLauncher, environ: Mapping[str, str]) -> Started | None:
    rank, size, local_rank, local_size = (_number(name, environ) for name in launcher.identity)
    if rank is None or size is None:
        return None
    if rank >= size:
        names = launcher.identity
        raise UsageError(f"{names.rank}={rank} and {names.size}={size} contradict each other", hint=HINT)
    if local_size is None and _number(launcher.hosts, environ) == 1:
        local_size = size
    return Started(launcher, rank, size, local_rank, local_size)


def _number(name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None
