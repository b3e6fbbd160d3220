"""Summarizes a plan in one line: ranks, hosts, threads, backend, precision and launcher."""

from __future__ import annotations

from cpulaunch import launchers, variables
from cpulaunch.model.hosts import fold_hosts
from cpulaunch.plan.plan import Plan
from cpulaunch.wording import counted


def describe(plan: Plan, separator: str = " · ") -> str:
    """Return ``"8 ranks on 4 hosts (node[1-4]), 13 threads each · planned: ccl, precision bf16 · …"``."""
    parts = (f"{size(plan)}, {_threads(plan)}", _trains_with(plan), started(plan))
    return separator.join(filter(None, parts))


def size(plan: Plan) -> str:
    """Return the number of ranks or instances, or the only instance, and the hosts."""
    if plan.instances and plan.instances.count > plan.world_size:
        programs = f"only instance {plan.instances.first} of {plan.instances.count}"
    else:
        programs = counted(plan.world_size, plan.noun)
    names = [host.host for host in plan.hosts]
    where = "this machine" if plan.here_alone else f"{counted(len(names), 'host')} ({fold_hosts(names)})"
    return f"{programs} on {where}"


def started(plan: Plan) -> str:
    """Return the launcher, and the reason if cpulaunch chose it."""
    launcher = launchers.load(plan.launcher)
    why = f" ({plan.launcher_why})" if plan.launcher_why else ""
    return "started directly" if launcher.agents_are_children else f"started by {launcher.title}{why}"


def _threads(plan: Plan) -> str:
    threads = sorted({rank.threads for host in plan.hosts for rank in host.ranks})
    if len(threads) > 1:
        return f"{threads[0]} to {threads[-1]} threads each"
    return counted(threads[0], "thread") + (" each" if plan.world_size > 1 else "")


def _trains_with(plan: Plan) -> str:
    """Return the backend and the precision of scripts that choose none themselves."""
    if plan.instances:
        return f"no process group, {plan.precision}" if plan.program.python else "no process group"
    if not plan.program.python:
        return ""
    if plan.settings.training.as_written:
        return "as written"
    backend = plan.env[variables.BACKEND]
    if backend == "ccl" and plan.settings.ccl.binding == "oneccl_bind_pt":
        backend = "ccl from oneccl_bind_pt"
    return f"planned: {backend}, {plan.precision}"
