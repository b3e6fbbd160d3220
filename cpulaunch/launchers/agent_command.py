"""What every launcher starts for every rank, the same everywhere: the agent with the program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpulaunch import variables
from cpulaunch.errors import PlanError
from cpulaunch.plan.placement import HostSpec, Placement, guard
from cpulaunch.plan.plan import Plan

if TYPE_CHECKING:
    from cpulaunch.launchers.base import Launcher
    from cpulaunch.model.installation import Installation

_MAX_VARIABLE = 128 * 1024
"""Bytes that Linux lets one variable have (MAX_ARG_STRLEN of execve(2))."""


def agent_argv(plan: Plan, installation: Installation) -> list[str]:
    """The agent's command line.  ``-I -S`` keep the user's modules, variables and .pth files out."""
    return [plan.program.interpreter, "-I", "-S", installation.agent, "--", *guard(plan.program.argv)]


def placement_variable(plan: Plan, launcher: Launcher) -> dict[str, str]:
    """The variable that tells the agents the plan.  Hosts with the same specification share an entry."""
    numbers: dict[object, int] = {}
    specs: list[HostSpec] = []
    hosts = []
    for host in plan.hosts:
        spec = HostSpec.of(host)
        number = numbers.setdefault(_hashable(spec), len(specs))
        if number == len(specs):
            specs.append(spec)
        hosts.append((host.host, number))
    text = Placement(
        launcher=launcher.name,
        identity=launcher.identity,
        agents_are_children=launcher.agents_are_children,
        daemon_outlives_link=launcher.daemon_outlives_link,
        python=plan.program.python,
        directory=plan.program.directory,
        hosts=hosts,
        host_specs=specs,
        request=plan.request.to_json(),
        env={name: plan.env[name] for name in plan.private},
        heartbeat_timeout=plan.setting("watch.heartbeat_timeout"),
        grace_period=plan.setting("watch.grace_period"),
        lenient=plan.setting("cpu.lenient"),
    ).to_text()
    if len(variables.PLACEMENT) + len(text) + 2 > _MAX_VARIABLE:
        raise PlanError(
            f"the plan of {len(plan.hosts)} hosts takes {len(text)} bytes; a variable holds {_MAX_VARIABLE}",
            hint="shorter host names, or fewer values in env:, make it smaller",
        )
    return {variables.PLACEMENT: text}


def _hashable(spec: HostSpec) -> object:
    ranks = tuple((*rank[:-1], tuple(rank.env.items())) for rank in spec.ranks)
    return spec.assumed, tuple(spec.env.items()), ranks
