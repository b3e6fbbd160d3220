"""Starter ``local``: the launcher itself starts the ranks of this machine, without MPI."""

from __future__ import annotations

from cpulaunch import variables
from cpulaunch.launchers.agent_command import agent_argv, placement_variable
from cpulaunch.launchers.command import Command
from cpulaunch.plan.plan import Plan


def commands(plan: Plan) -> tuple[Command, ...]:
    """One command per rank, alike but for the rank's number."""
    argv = tuple(agent_argv(plan))
    shared = {name: value for name, value in plan.env.items() if name not in plan.private}
    shared.update(placement_variable(plan))
    size = str(plan.world_size)

    def identity(rank: int) -> dict[str, str]:
        return dict(zip(variables.LOCAL_IDENTITY, (str(rank), size, str(rank), size), strict=True))

    return tuple(Command(argv, {**shared, **identity(rank)}) for rank in range(plan.world_size))
