"""What every launcher starts for every rank, the same everywhere: the agent with the program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpulaunch.errors import PlanError
from cpulaunch.plan.placement import VARIABLE, Layout, Place, Placement, guard
from cpulaunch.plan.plan import HostPlan, Plan

if TYPE_CHECKING:
    from cpulaunch.launchers.base import Launcher
    from cpulaunch.model.installation import Installation

_MAX_VARIABLE = 128 * 1024
"""Bytes that Linux lets one variable have (MAX_ARG_STRLEN of execve(2))."""


def agent_argv(plan: Plan, installation: Installation) -> list[str]:
    """The agent's command line.  ``-I -S`` keep the user's modules, variables and .pth files out."""
    return [plan.program.interpreter, "-I", "-S", installation.agent, "--", *guard(plan.program.argv)]


def placement_variable(plan: Plan, launcher: Launcher) -> dict[str, str]:
    """The variable that tells the agents the plan.  Hosts that are laid out alike share an entry."""
    numbers: dict[object, int] = {}
    layouts: list[Layout] = []
    hosts = []
    for host in plan.hosts:
        number = numbers.setdefault(_alike(host), len(layouts))
        if number == len(layouts):
            places = [
                Place(r.cores, r.comm_cores, r.numa_nodes, r.threads, r.memory_policy, r.env)
                for r in host.ranks
            ]
            layouts.append(Layout(host.assumed, host.env, places))
        hosts.append((host.host, number))
    text = Placement(
        starter=plan.starter,
        python=plan.program.python,
        directory=plan.program.directory,
        hosts=hosts,
        layouts=layouts,
        binding=plan.binding,
        libraries=plan.libraries,
        env={name: plan.env[name] for name in plan.private},
        heartbeat_timeout=plan.setting("watch.heartbeat_timeout"),
        grace_period=plan.setting("watch.grace_period"),
        lenient=plan.setting("cpu.lenient"),
    ).to_text()
    if len(VARIABLE) + len(text) + 2 > _MAX_VARIABLE:
        raise PlanError(
            f"the plan of {len(plan.hosts)} hosts takes {len(text)} bytes; a variable holds {_MAX_VARIABLE}",
            hint="shorter host names, or fewer values in env:, make it smaller",
        )
    return {VARIABLE: text}


def _alike(host: HostPlan) -> object:
    ranks = tuple(
        (r.cores, r.comm_cores, r.numa_nodes, r.threads, r.memory_policy, tuple(r.env.items()))
        for r in host.ranks
    )
    return host.assumed, tuple(host.env.items()), ranks
