"""What a configuration would do on this machine: the plan in short, and what is unwise about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

from cpulaunch import variables
from cpulaunch.cli.facts import gather
from cpulaunch.cli.show import crowded, started
from cpulaunch.config.config import Config
from cpulaunch.errors import CpulaunchError
from cpulaunch.model.facts import Facts
from cpulaunch.model.hosts import LOCALHOST
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.picture import picture
from cpulaunch.plan.plan import Plan, Program
from cpulaunch.plan.training import decide_precision, without_bf16
from cpulaunch.wording import counted

PINNING = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND", "I_MPI_PIN",
           "I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "CCL_WORKER_AFFINITY")  # fmt: skip
SHORT_HEARTBEAT = 5  # seconds


def preview(config: Config) -> tuple[Facts, Plan]:
    """The plan of ``cpulaunch run train.py``, and the facts it is from.  Raises what that would raise."""
    facts = gather(config, tell=lambda line: None)
    program = Program((sys.executable, "train.py"), True, os.getcwd(), sys.executable)
    return facts, make_plan(config, facts, program)


def summary(plan: Plan) -> Iterator[str]:
    """The plan in a few lines."""
    names = [host.host for host in plan.hosts]
    shown = ", ".join(names if len(names) < 4 else [names[0], "...", names[-1]])
    where = "this machine" if plan.here_alone else f"{counted(len(names), 'host')} ({shown})"
    threads = sorted({rank.threads for host in plan.hosts for rank in host.ranks})
    each = counted(threads[0], "thread") if len(threads) == 1 else f"{threads[0]} to {threads[-1]} threads"
    yield f"{counted(plan.world_size, 'rank')} on {where}, {each} each, {started(plan)}"
    if plan.setting("training.as_written"):
        yield "the script as written decides the backend and the precision"
    else:
        yield f"backend {plan.env[variables.BACKEND]}, precision {plan.env[variables.PRECISION]}"
    for note in plan.notes:
        yield f"note: {note}"


def picture_of_first_host(
    plan: Plan, facts: Facts, *, width: int, colour: bool, unicode: bool, table: bool = True
) -> str:
    """The picture of the first host and its ranks' CPUs, with a table of the ranks or without."""
    host = plan.hosts[0]
    topology = facts.of(host.host)[0].topology
    return picture(topology, host.ranks, width=width, colour=colour, unicode=unicode, table=table)


def unwise_settings(config: Config) -> Iterator[str]:
    """What is valid, but would not work, or not work well, when started from this machine."""
    try:
        facts, plan = preview(config)
    except CpulaunchError as e:
        yield f"it can't run from this machine: {e}" + (f" ({e.hint})" if e.hint else "")
        return
    yield from _pinning_variables(config["env"])
    if config.is_set("training.precision"):
        lacking = without_bf16({LOCALHOST: facts.like})
        if note := decide_precision(config["training.precision"], is_set=True, lacking=lacking).note:
            yield f"{config.where('training.precision')}: {note}"
    workers = config["ccl.worker_count"]
    for host in plan.hosts:
        smallest = min(len(rank.cores) for rank in host.ranks)
        if workers != "auto" and plan.env[variables.BACKEND] == "ccl" and workers >= smallest:
            yield (f"{config.where('ccl.worker_count')}: {workers} workers per rank, but only "
                   f"{counted(smallest, 'core')} left to compute on {host.host}")  # fmt: skip
            break
    yield from crowded(config, plan)
    if plan.env[variables.BACKEND] != "ccl" and workers != "auto":
        yield f"{config.where('ccl.worker_count')}: has no effect with {plan.env[variables.BACKEND]}"
    if 0 < config["watch.heartbeat_timeout"] < SHORT_HEARTBEAT:
        yield (f"{config.where('watch.heartbeat_timeout')}: a busy host may well be silent for "
               f"{config['watch.heartbeat_timeout']} s, and would count as lost")  # fmt: skip


def _pinning_variables(env: Mapping[str, str]) -> Iterator[str]:
    for name in PINNING:
        if name in env:
            yield f"env: {name} binds as well: cpulaunch already binds every rank, and the two may fight"
