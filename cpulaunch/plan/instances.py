"""Instances: independent programs on cores of their own, in place of the ranks of one job.

To everything but the program itself, an instance is a rank: it is placed, started and watched as one.  But it
is told no rank, there is no process group, and where one fails, the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cpulaunch.config.config import DEFAULT, Config
from cpulaunch.config.settings import SETTINGS
from cpulaunch.errors import ConfigError, PlanError
from cpulaunch.model.names import INSTANCE, Names
from cpulaunch.plan.plan import HostPlan, Program
from cpulaunch.plan.request import HostRequest
from cpulaunch.wording import counted

NO_BACKEND = "none"
"""The backend of programs that have no process group."""

THROUGHPUT_MODE, LATENCY_MODE = "throughput-mode", "latency-mode"
"""The options by which each instance gets a NUMA node, and as many as fit a few cores, without dashes."""

# Settings of ranks, each with what an error says to use instead.
_OF_RANKS = {
    "hosts.nproc": "leave it out: --instances N is the number of instances",
    "hosts.nproc_per_node": "leave it out: --instances N is divided evenly over the hosts",
    "cpu.cores_per_rank": "--cores-per-instance C",
    "watch.max_restarts": "leave it out: the others go on where an instance fails",
}


def are_wanted(config: Config) -> bool:
    """Whether ``config``, as `as_instances` has made it, is one of instances."""
    wanted: bool = config["instances.count"] != "none"
    return wanted


def as_instances(config: Config, lines: int = 0) -> Config:
    """``config`` as its job is planned by: where that is of instances, without what is about ranks.

    ``lines`` is the number of lines of ``--each``, 0 without that.  What it returns, it returns unchanged.
    Raises ConfigError for settings that contradict each other and are equally strong; of others, the stronger
    one counts.
    """
    config = with_their_number(config, lines)
    if not are_wanted(config):
        _refuse_what_needs_instances(config)
        return config
    cores = config["instances.cores_per_instance"]
    if config.origins["instances.count"].lstrip("-") == THROUGHPUT_MODE and cores != "auto":
        hint = "--cores-per-instance alone starts as many as fit"
        _refuse_unless_weaker(config, "instances.cores_per_instance", hint)
        config, cores = _reset(config, "instances.cores_per_instance", "auto"), "auto"
    for key, hint in _OF_RANKS.items():
        if config[key] != SETTINGS[key].default:
            _refuse_unless_weaker(config, key, hint)
    if ":" in str(config["hosts.nnodes"]):
        _refuse_unless_weaker(config, "hosts.nnodes", "--nnodes N: instances aren't restarted on fewer hosts")
    changed = {
        "hosts.nproc": "auto",
        "hosts.nproc_per_node": "auto",
        "cpu.cores_per_rank": cores,
        "training.backend": NO_BACKEND,
        "watch.max_restarts": 0,
    }
    if config["watch.stall_action"] == "restart":
        _refuse_unless_weaker(config, "watch.stall_action", "--stall-action abort ends stalled instances")
        changed["watch.stall_action"] = "report"
    for key, value in changed.items():
        config = _reset(config, key, value)
    return config


def with_their_number(config: Config, lines: int = 0) -> Config:
    """``config`` with the number of instances that other settings stand for, or none of them.

    That number is none where a number of ranks is asked for by a stronger source.  ``lines`` as above.
    """
    if _ranks_are_said(config, lines):
        return _without_instances(config)
    mode = config.origins["instances.cores_per_instance"]
    if mode.lstrip("-") == LATENCY_MODE and _strength(config.origins["instances.count"]) < _strength(mode):
        config = _reset(config, "instances.count", "none")
    return config if are_wanted(config) else _counted_by_others(config, lines)


def _ranks_are_said(config: Config, lines: int) -> bool:
    """Whether a number of ranks is asked for by a stronger source than all that makes instances."""
    instances = [config.origins[key] for key in ("instances.count", "instances.cores_per_instance")]
    strongest = max(map(_strength, [*instances, *["--each"] * bool(lines)]))
    ranks = [key for key in ("hosts.nproc", "hosts.nproc_per_node") if config[key] != SETTINGS[key].default]
    return any(_strength(config.origins[key]) > strongest for key in ranks)


def _without_instances(config: Config) -> Config:
    for key, value in (("count", "none"), ("cores_per_instance", "auto")):
        config = _reset(config, f"instances.{key}", value)
    if _strength(config.origins["instances.only"]) < _strength("--instance"):
        config = _reset(config, "instances.only", "all")
    return config


def _refuse_what_needs_instances(config: Config) -> None:
    only, fail_fast = config["instances.only"] != "all", "instances.fail_fast"
    said = ["instances.only"] if config.is_set("instances.only") and only else []
    # A file may say for all jobs what there is to do where one of many instances fails.
    said += [fail_fast] if config[fail_fast] and config.origins[fail_fast].startswith("-") else []
    for key in said:
        hint = "--instances N, or --instances auto"
        raise ConfigError(f"{config.where(key)}: the job has no instances", hint=hint)


def _counted_by_others(config: Config, lines: int) -> Config:
    """With the number of instances that ``--each`` or their cores stand for, unless it is said to be none.

    A weaker source, such as a file, doesn't say so.
    """
    none = _strength(config.origins["instances.count"])
    if lines and none < _strength("--each"):
        return _put(config, "instances.count", lines, "--each")
    cores = config.origins["instances.cores_per_instance"]
    if config["instances.cores_per_instance"] != "auto" and none < _strength(cores):
        return _put(config, "instances.count", "auto", cores)
    return config


def _refuse_unless_weaker(config: Config, key: str, hint: str) -> None:
    if _strength(config.origins[key]) >= _strength(config.origins["instances.count"]):
        raise ConfigError(f"{config.where(key)} contradicts {config.where('instances.count')}", hint=hint)


def _strength(origin: str) -> int:
    """How strong a source is: the command line, the environment, a file."""
    if origin == DEFAULT:
        return 0
    return {"-": 3, "$": 2}.get(origin[0], 1)


def _reset(config: Config, key: str, value: Any) -> Config:
    return _put(config, key, value, DEFAULT)


def _put(config: Config, key: str, value: Any, origin: str) -> Config:
    return replace(config, values={**config.values, key: value}, origins={**config.origins, key: origin})


def check_lines(program: Program, count: int) -> None:
    """PlanError where there isn't a line of arguments for each instance."""
    if program.each and len(program.each) != count:
        raise PlanError(
            f"--each has {counted(len(program.each), 'line')}, and the job {counted(count, 'instance')}",
            hint="without a number of instances, each line is one",
        )


def only_one(
    config: Config, hosts: Sequence[HostPlan], request: HostRequest
) -> tuple[tuple[HostPlan, ...], HostRequest, int]:
    """The one instance that is to run, as the plan's only one, and its number.

    PlanError where there is none of this number.  The request is such that the agent of a host that nobody
    looked at comes to the same cores.
    """
    number: int = config["instances.only"]
    every = [(host, rank) for host in hosts for rank in host.ranks]
    if number >= len(every):
        raise PlanError(
            f"{config.where('instances.only')}: there is no instance {number}",
            hint=Names(INSTANCE).all_of(len(every)),
        )
    host, rank = every[number]
    binding = replace(request.binding, cores=rank.cores, cores_per_rank="auto")
    alone = replace(host, ranks=(replace(rank, rank=0, local_rank=0),))
    return (alone,), replace(request, binding=binding), number
