"""Who has started a process that cpulaunch has not, and as which rank: by the variables that it gets.

Variables of a step or of one mpiexec count, and those of an allocation don't: a batch shell is no rank.
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
    """A program that starts ranks, and the variables that it sets for them.

    ``hosts`` has the number of the ranks' hosts, ``nodes`` these hosts, rank 0's first unless ``unordered``,
    a variable, has the value beside it.  ``start`` are those that name one start among all.  Each is empty
    where there is none.
    """

    title: str
    identity: IdentityVariables
    hosts: str = ""
    nodes: str = ""
    unordered: tuple[str, str] = ("", "")
    start: tuple[str, ...] = ()


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
"""From the innermost out: an mpiexec may start its processes on other hosts by srun, but not the reverse."""

HINT = (
    "`cpulaunch run` starts the ranks itself; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set for each of "
    f"them, let them join; with {variables.SEPARATE}=1 each process trains a model of its own"
)
"""What to do where the ranks can't join each other."""

_WITHOUT_SIZE = ("PALS_RANKID", "PMIX_RANK")
"""Variables for the rank that may come without one for the number of ranks."""


class Started(NamedTuple):
    """The rank that a process was started as.

    ``local_rank`` and ``local_size`` are None where the launcher doesn't tell them.
    """

    launcher: OtherLauncher
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None

    def first_host(self, environ: Mapping[str, str]) -> str:
        """Rank 0's host; empty where that isn't known."""
        if self.local_size == self.size:
            return "127.0.0.1"
        name, (variable, value) = self.launcher.nodes, self.launcher.unordered
        if not environ.get(name) or environ.get(variable) == value:
            return ""
        return parse_hosts(environ[name], f"${name}")[0].name

    def __str__(self) -> str:
        return f"{self.launcher.title} started this process as rank {self.rank} of {self.size}"


def started_as(environ: Mapping[str, str]) -> Started | None:
    """The rank, among several, that another launcher started this process as; None where it is alone.

    Raises UsageError where a launcher says which rank this is, and not of how many.
    """
    found = [started for launcher in OTHERS if (started := _started_by(launcher, environ))]
    if not found:
        if name := next((name for name in _WITHOUT_SIZE if name in environ), ""):
            raise UsageError(
                f"{name}={environ[name]} says that another launcher started this process, and nothing says "
                "how many it started",
                hint=HINT,
            )
        return None
    # Slurm's PMI gives a step's tasks an MPI's variables, too; its own tell more.
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
