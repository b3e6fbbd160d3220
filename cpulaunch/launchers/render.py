"""Plan → commands.  The registry of starters: a new one is a module beside this, and a line here."""

from __future__ import annotations

from cpulaunch.launchers import local, mpi
from cpulaunch.launchers.command import Command
from cpulaunch.plan.plan import Plan

_STARTERS = {"local": local.commands, **dict.fromkeys(mpi.FLAVOURS, mpi.commands)}


def render(plan: Plan) -> tuple[Command, ...]:
    """What to start for ``plan``.  Pure: the same plan gives the same commands."""
    return _STARTERS[plan.starter](plan)
