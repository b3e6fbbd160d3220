"""Starter ``local``: the launcher itself starts the ranks of this machine, without MPI."""

from __future__ import annotations

from cpulaunch.launchers.agent_command import agent_argv, placement_variable
from cpulaunch.launchers.command import Command
from cpulaunch.plan.plan import Plan


def commands(plan: Plan) -> tuple[Command, ...]:
    """One command per rank, alike but for the rank's number."""
    argv = tuple(agent_argv(plan))
    shared = {name: value for name, value in plan.env.items() if name not in plan.private}
    shared.update(placement_variable(plan))
    size = str(plan.world_size)
    return tuple(
        Command(
            argv,
            {
                **shared,
                "CPULAUNCH_RANK": str(rank),
                "CPULAUNCH_SIZE": size,
                "CPULAUNCH_LOCAL_RANK": str(rank),
                "CPULAUNCH_LOCAL_SIZE": size,
            },
        )
        for rank in range(plan.world_size)
    )
