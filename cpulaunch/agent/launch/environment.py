"""A process's rank, and the host, cores and environment that the plan gives to the rank.  No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cpulaunch import variables
from cpulaunch.errors import HostError
from cpulaunch.plan.placement import HostPlan, IdentityVariables, Placement, RankPlan, own_arguments
from cpulaunch.wording import counted

WITHOUT_LAUNCHER = "pasted"
"""The id of a job that runs from the lines of ``--dry-run --format shell``, without a launcher."""

_OF_THE_AGENT = (
    variables.TOKEN,
    variables.CONTROL,
    variables.LAUNCHER_PID,
    *variables.PLACEMENT,
    variables.OPEN_FILES,
    variables.KEPT_PORT,
    *variables.LOCAL_IDENTITY,
)
"""Variables that only the agent needs; they are removed from the program's environment."""


_OF_A_RANK = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    variables.JOB_RANK,
)  # fmt: skip
"""Variables that would make an instance act as a rank; they are removed from its environment."""


class Identity(NamedTuple):
    """A process's rank and its number on the host, as its launcher reports them.

    ``local_size`` is None if the launcher doesn't report it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int | None


class Assignment(NamedTuple):
    """The plan's part for one rank.  ``group_rank`` is the number of its host."""

    group_rank: int
    host: HostPlan
    local_rank: int

    @property
    def rank(self) -> RankPlan:
        return self.host.ranks[self.local_rank]


def assignment(placement: Placement, identity: Identity) -> Assignment:
    """Find this rank in the plan.  Raises HostError if the launcher's ranks differ from the planned ones."""
    sizes = [len(host.ranks) for host in placement.hosts]
    names = placement.names
    if sum(sizes) != identity.size:
        started = counted(identity.size, names.noun)
        raise HostError(f"{placement.launcher} started {started}, but {sum(sizes)} were planned")
    first, group_rank = 0, 0
    while identity.rank >= first + sizes[group_rank]:
        first += sizes[group_rank]
        group_rank += 1
    host, size = placement.hosts[group_rank], sizes[group_rank]
    local_size = size if identity.local_size is None else identity.local_size
    if (identity.rank - first, size) != (identity.local_rank, local_size):
        raise HostError(
            f"{names.one(identity.rank)} was planned as local rank {identity.rank - first} of {size} "
            f"on {host.host}, but {placement.launcher} made it local rank {identity.local_rank} of "
            f"{local_size}",
            hint="are two names in the hostfile the same host?",
        )
    return Assignment(group_rank, host, identity.local_rank)


def program_environment(
    placement: Placement, identity: Identity, assigned: Assignment, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables of the program.  It inherits most of the agent's own variables, ``environ``."""
    left_out = {*_OF_THE_AGENT, *placement.hidden, *(_OF_A_RANK if placement.instances else ())}
    env = {name: value for name, value in environ.items() if name not in left_out}
    env.update(placement.env)
    env.update(assigned.host.env)
    env.update(assigned.rank.env)
    env.setdefault(variables.JOB_ID, WITHOUT_LAUNCHER)
    if placement.instances:
        env[variables.INSTANCE] = str(placement.names.number(identity.rank))
        env[variables.INSTANCES] = str(placement.instances)
        return env
    env.update(
        RANK=str(identity.rank),
        WORLD_SIZE=str(identity.size),
        LOCAL_RANK=str(identity.local_rank),
        LOCAL_WORLD_SIZE=str(len(assigned.host.ranks)),
        GROUP_RANK=str(assigned.group_rank),
        GROUP_WORLD_SIZE=str(len(placement.hosts)),
    )
    env[variables.JOB_RANK] = f"{identity.rank}/{identity.size}"
    env.update(_as_torchrun(env))
    return env


def program_arguments(placement: Placement, identity: Identity, argv: Sequence[str]) -> list[str]:
    """The program's command line.

    An instance gets its own arguments in addition, and its number in place of ``{instance}``.
    """
    if not placement.instances:
        return list(argv)
    own = placement.each[identity.rank] if placement.each else ()
    return own_arguments(argv, own, placement.names.number(identity.rank))


def _as_torchrun(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of torchrun that libraries use to detect a launcher.

    TORCHELASTIC_USE_AGENT_STORE is False because rank 0, not the agent, hosts torch's store.
    """
    return {
        "ROLE_NAME": "default",
        "ROLE_RANK": env["RANK"],
        "ROLE_WORLD_SIZE": env["WORLD_SIZE"],
        "TORCHELASTIC_RUN_ID": env[variables.JOB_ID],
        "TORCHELASTIC_RESTART_COUNT": env.get(variables.RESTART_COUNT, "0"),
        "TORCHELASTIC_MAX_RESTARTS": env.get(variables.MAX_RESTARTS, "0"),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def planned_preloads(placement: Placement, host: HostPlan, environ: Mapping[str, str]) -> list[str]:
    """The libraries of the plan's LD_PRELOAD that are not in the user's."""
    users = placement.env.get("LD_PRELOAD") or environ.get("LD_PRELOAD", "")
    planned = set(filter(None, host.env.get("LD_PRELOAD", "").split(":")))
    return sorted(planned - set(users.replace(":", " ").split()))


def identify(launcher: str, names: IdentityVariables, environ: Mapping[str, str]) -> Identity:
    """Read this process's identity from the variables ``names``, which ``launcher`` sets.

    Raises HostError if one of them is not set or is not a number.
    """

    def read(name: str) -> int:
        try:
            return int(environ[name])
        except (KeyError, ValueError):
            raise HostError(
                f"{launcher} was to start this process, but {name} is {environ.get(name, 'not set')}",
                hint="is another MPI's mpiexec, or another launcher, in between?",
            ) from None

    local_size = read(names.local_size) if names.local_size else None
    return Identity(read(names.rank), read(names.size), read(names.local_rank), local_size)
