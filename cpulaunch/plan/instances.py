"""Instances: independent programs, each on its own cores, instead of the ranks of one job.

An instance is placed, started and watched like a rank.  But it gets no rank variables and no process group,
and if it fails, the other instances continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from cpulaunch.config.config import Config
from cpulaunch.config.origin import Origin, Source
from cpulaunch.config.setting import Setting
from cpulaunch.config.values import HostCount
from cpulaunch.errors import ConfigError, PlanError
from cpulaunch.model.names import INSTANCE, Names
from cpulaunch.plan.placement import HostPlan
from cpulaunch.plan.plan import Program
from cpulaunch.plan.request import HostRequest
from cpulaunch.wording import counted

NO_BACKEND: Literal["none"] = "none"
"""The backend of programs without a process group."""

THROUGHPUT_MODE, LATENCY_MODE = "throughput-mode", "latency-mode"
"""Options without dashes: one instance per NUMA node, or as many instances of a few cores as fit."""

_EACH = Origin.of_option("--each")

# Settings that only ranks have, each with the hint of an error.
_OF_RANKS: dict[Setting[Any], str] = {
    Config.hosts.nproc: "leave it out: --instances N is the number of instances",
    Config.hosts.nproc_per_node: "leave it out: --instances N is divided evenly over the hosts",
    Config.cpu.cores_per_rank: "--cores-per-instance C",
    Config.watch.max_restarts: "leave it out: if an instance fails, the others continue",
}


def are_wanted(config: Config) -> bool:
    """Return whether ``config``, as returned by `as_instances`, is a job of instances."""
    return config.instances.count != "none"


def as_instances(config: Config, lines: int = 0) -> Config:
    """Return ``config`` with the number of instances, and without settings that instances don't have.

    ``lines`` is the number of lines of ``--each``, or 0 without ``--each``.  Idempotent.  If two settings
    contradict each other, the one from the stronger source wins.  Raises ConfigError if their sources are
    equally strong.
    """
    config = with_their_number(config, lines)
    if not are_wanted(config):
        _refuse_what_needs_instances(config)
        return config
    mode = config.origin(Config.instances.count)
    if mode.option == THROUGHPUT_MODE and config.instances.cores_per_instance != "auto":
        hint = "--cores-per-instance alone starts as many as fit"
        _refuse_unless_weaker(config, Config.instances.cores_per_instance, hint)
        config = config.reset(Config.instances.cores_per_instance)
    for setting, hint in _OF_RANKS.items():
        if config.value(setting) != setting.default:
            _refuse_unless_weaker(config, setting, hint)
    nnodes = config.hosts.nnodes
    if isinstance(nnodes, HostCount) and nnodes.least < nnodes.most:
        hint = "--nnodes N: instances aren't restarted on fewer hosts"
        _refuse_unless_weaker(config, Config.hosts.nnodes, hint)
    if config.watch.stall_action == "restart":
        hint = "--stall-action abort ends stalled instances"
        _refuse_unless_weaker(config, Config.watch.stall_action, hint)
        config = config.reset(Config.watch.stall_action)
    config = config.reset(*_OF_RANKS)
    config = config.put(Config.cpu.cores_per_rank, config.instances.cores_per_instance)
    return config.put(Config.training.backend, NO_BACKEND)


def with_their_number(config: Config, lines: int = 0) -> Config:
    """Return ``config`` with the number of instances that other settings imply.

    There are no instances if a stronger source sets a number of ranks.  ``lines`` is that of `as_instances`.
    """
    if _ranks_override_instances(config, lines):
        return _without_instances(config)
    mode = config.origin(Config.instances.cores_per_instance)
    if mode.option == LATENCY_MODE and config.origin(Config.instances.count).source < mode.source:
        config = config.reset(Config.instances.count)
    return config if are_wanted(config) else _counted_by_others(config, lines)


def _ranks_override_instances(config: Config, lines: int) -> bool:
    """Return whether the number of ranks has a stronger source than all settings that imply instances."""
    instances = [config.origin(Config.instances.count), config.origin(Config.instances.cores_per_instance)]
    strongest = max(origin.source for origin in [*instances, *[_EACH] * bool(lines)])
    ranks = [
        setting
        for setting in (Config.hosts.nproc, Config.hosts.nproc_per_node)
        if config.value(setting) != setting.default
    ]
    return any(config.origin(setting).source > strongest for setting in ranks)


def _without_instances(config: Config) -> Config:
    config = config.reset(Config.instances.count, Config.instances.cores_per_instance)
    if config.origin(Config.instances.only).source < Source.COMMAND_LINE:
        config = config.reset(Config.instances.only)
    return config


def _refuse_what_needs_instances(config: Config) -> None:
    refused: list[Setting[Any]] = [Config.instances.only] if config.instances.only != "all" else []
    # In a file, the setting is for all jobs, also those without instances.
    if config.instances.fail_fast and config.origin(Config.instances.fail_fast).source is Source.COMMAND_LINE:
        refused.append(Config.instances.fail_fast)
    for setting in refused:
        hint = "--instances N, or --instances auto"
        raise ConfigError(f"{config.where(setting)}: the job has no instances", hint=hint)


def _counted_by_others(config: Config, lines: int) -> Config:
    """Add the number of instances that ``--each`` or ``--cores-per-instance`` implies.

    A stronger source that sets no instances prevents it; a weaker source, such as a file, does not.
    """
    none = config.origin(Config.instances.count).source
    if lines and none < _EACH.source:
        return config.put(Config.instances.count, lines, _EACH)
    cores = config.origin(Config.instances.cores_per_instance)
    if config.instances.cores_per_instance != "auto" and none < cores.source:
        return config.put(Config.instances.count, "auto", cores)
    return config


def _refuse_unless_weaker(config: Config, setting: Setting[Any], hint: str) -> None:
    count = Config.instances.count
    if config.origin(setting).source >= config.origin(count).source:
        raise ConfigError(f"{config.where(setting)} contradicts {config.where(count)}", hint=hint)


def check_lines(program: Program, count: int) -> None:
    """Raise PlanError unless there is a line of arguments for each instance."""
    if program.each and len(program.each) != count:
        raise PlanError(
            f"--each has {counted(len(program.each), 'line')}, but the job has {counted(count, 'instance')}",
            hint="leave out the number of instances: --each starts one for each line",
        )


def only_one(
    config: Config, number: int, hosts: Sequence[HostPlan], request: HostRequest
) -> tuple[tuple[HostPlan, ...], HostRequest]:
    """Return the hosts and the request of a plan with instance ``number`` alone.

    The request restricts the host to the instance's cores.  Raises PlanError if there is no such instance.
    """
    every = [(host, rank) for host in hosts for rank in host.ranks]
    if number >= len(every):
        raise PlanError(
            f"{config.where(Config.instances.only)}: there is no instance {number}",
            hint=Names(INSTANCE).all_of(len(every)),
        )
    host, rank = every[number]
    binding = replace(request.binding, cores=rank.cores, cores_per_rank="auto")
    alone = host._replace(ranks=(rank._replace(local_rank=0),))
    return (alone,), replace(request, binding=binding)
