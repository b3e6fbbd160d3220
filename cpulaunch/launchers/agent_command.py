"""The command line and environment that every launcher gives to every agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpulaunch.plan.placement import Placement, guard
from cpulaunch.plan.plan import Plan

if TYPE_CHECKING:
    from cpulaunch.launchers.base import Launcher
    from cpulaunch.launchers.command import Installation


def agent_argv(plan: Plan, installation: Installation) -> list[str]:
    """The agent's command line.  With ``-I -S``, it ignores the user's modules, variables and .pth files."""
    return [plan.program.interpreter, "-I", "-S", installation.agent, "--", *guard(plan.program.argv)]


def placement_variables(plan: Plan, launcher: Launcher) -> dict[str, str]:
    """The variables that carry the plan to the agents."""
    count, first = (plan.instances.count, plan.instances.first) if plan.instances else (0, 0)
    return Placement(
        launcher=launcher.name,
        identity=launcher.identity,
        agents_are_children=launcher.agents_are_children,
        daemon_outlives_link=launcher.daemon_outlives_link,
        python=plan.program.python,
        directory=plan.program.directory,
        hosts=plan.hosts,
        request=plan.request.to_json(),
        env={name: plan.env[name] for name in plan.private},
        hidden=plan.hidden,
        heartbeat_timeout=plan.settings.watch.heartbeat_timeout,
        grace_period=plan.settings.watch.grace_period,
        lenient=plan.settings.cpu.lenient,
        telemetry=plan.settings.watch.telemetry != "none",
        stdin=plan.settings.output.stdin,
        instances=count,
        first_instance=first,
        each=plan.program.each[first : first + plan.world_size],
    ).to_variables()
