"""The launcher ``local``: cpulaunch itself starts the agents of this host, without MPI."""

from __future__ import annotations

from cpulaunch import variables
from cpulaunch.launchers.agent_command import agent_argv, placement_variables
from cpulaunch.launchers.base import Launcher
from cpulaunch.launchers.command import Command, Installation
from cpulaunch.plan.placement import IdentityVariables
from cpulaunch.plan.plan import Plan


class Local(Launcher):
    name = "local"
    title = "cpulaunch"
    identity = IdentityVariables(*variables.LOCAL_IDENTITY)
    agents_are_children = True
    this_host_only = True

    def commands(self, plan: Plan, installation: Installation) -> tuple[Command, ...]:
        """One command for each rank.  They differ only in the variables of the rank's identity."""
        argv = tuple(agent_argv(plan, installation))
        shared = {name: value for name, value in plan.env.items() if name not in plan.private}
        shared.update(placement_variables(plan, self))
        size = str(plan.world_size)

        def identity(rank: int) -> dict[str, str]:
            return dict(zip(self.identity, (str(rank), size, str(rank), size), strict=True))

        return tuple(Command(argv, {**shared, **identity(rank)}) for rank in range(plan.world_size))


LOCAL = Local()
