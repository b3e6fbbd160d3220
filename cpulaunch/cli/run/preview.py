"""Previews a configuration on this machine: its plan, and warnings about its settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Set
from typing import Any

from cpulaunch import variables
from cpulaunch.cli.run.facts import gather
from cpulaunch.cli.run.plan_text import thread_warnings
from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SETTINGS
from cpulaunch.errors import CpulaunchError
from cpulaunch.model.facts import Facts
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.picture import Look, picture
from cpulaunch.plan.plan import Plan, Program
from cpulaunch.wording import counted

PINNING = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND", "I_MPI_PIN",
           "I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "CCL_WORKER_AFFINITY")  # fmt: skip
HOSTS: set[Setting[Any]] = {Config.hosts.hostfile, Config.hosts.list}
SHORT_HEARTBEAT = 5  # seconds


def preview(config: Config) -> tuple[Facts, Plan]:
    """Return the facts and the plan of ``cpulaunch run train.py``.  Raises the errors of this command."""
    facts = gather(config, tell=lambda line: None)
    program = Program((sys.executable, "train.py"), True, os.getcwd(), sys.executable)
    return facts, make_plan(config, facts, program)


def picture_of_first_host(
    plan: Plan, facts: Facts, *, width: int, colour: bool, unicode: bool, table: bool = True
) -> str:
    """Draw the first host and the CPUs of its ranks, with or without a table of the ranks."""
    host = plan.hosts[0]
    topology = facts.of(host.host)[0].topology
    look = Look(colour, unicode)
    # The name of a single instance is its number among all instances.
    ranks = [rank._replace(local_rank=plan.names.first + rank.local_rank) for rank in host.ranks]
    return picture(topology, ranks, width=width, look=look, table=table, noun=plan.noun)


def unwise_settings(config: Config) -> Iterator[str]:
    """Yield warnings about valid settings that would not work, or would be slow, from this machine."""
    config, obstacles = _settings_that_run(config)
    for e in obstacles:
        yield f"this can't run from this machine: {e}" + (f" ({e.hint})" if e.hint else "")
    yield from _pinning_variables(config.env)
    try:
        _, plan = preview(config)
    except CpulaunchError:
        return  # this error is in `obstacles`
    if plan.precision.warning:
        yield f"{config.where(Config.training.precision)}: {plan.precision.warning}"
    workers, backend = config.ccl.worker_count, plan.env.get(variables.BACKEND, "")
    for host in plan.hosts:
        smallest = min(len(rank.cores) for rank in host.ranks)
        if workers != "auto" and backend == "ccl" and workers >= smallest:
            yield (f"{config.where(Config.ccl.worker_count)}: {workers} workers per rank, but only "
                   f"{counted(smallest, 'core')} left to compute on {host.host}")  # fmt: skip
            break
    yield from thread_warnings(config, plan)
    without = "on instances" if plan.instances else f"with {backend}"
    if backend != "ccl" and workers != "auto":
        yield f"{config.where(Config.ccl.worker_count)}: has no effect {without}"
    if 0 < (timeout := config.watch.heartbeat_timeout) < SHORT_HEARTBEAT:
        yield (f"{config.where(Config.watch.heartbeat_timeout)}: a busy host may send no heartbeat for "
               f"{timeout} s, and would count as lost")  # fmt: skip


def _settings_that_run(config: Config) -> tuple[Config, list[CpulaunchError]]:
    """Reset the settings that prevent a plan; return the remaining settings, and the errors of the others."""
    try:
        preview(config)
        return config, []
    except CpulaunchError as e:
        first = e
    taken: set[Setting[Any]] = set()
    left = [setting for setting in SETTINGS.values() if config.is_set(setting)]
    while True:  # hosts.oversubscribe may allow settings that failed before
        errors: dict[Setting[Any], CpulaunchError] = {}
        for setting in left:
            try:
                preview(_with_only(config, {*taken, setting}))
                taken.add(setting)
            except CpulaunchError as e:
                errors[setting] = e
        if len(errors) == len(left):
            break
        left = list(errors)
    if HOSTS & errors.keys():  # the numbers may fit the hosts that are unknown here
        errors = {key: e for key, e in errors.items() if key in HOSTS or key.section != "hosts"}
    return _with_only(config, taken), list({str(e): e for e in errors.values()}.values()) or [first]


def _with_only(config: Config, kept: Set[Setting[Any]]) -> Config:
    return config.reset(*(setting for setting in SETTINGS.values() if setting not in kept))


def _pinning_variables(env: Mapping[str, str]) -> Iterator[str]:
    for name in PINNING:
        if name in env:
            yield f"env: {name} also pins ranks, and may conflict with cpulaunch, which pins every rank"
