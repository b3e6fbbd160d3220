"""Checks and plans a job before it is submitted, as `cpulaunch run` would in the job."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cpulaunch.cli.backend import ensure_ccl
from cpulaunch.cli.options import refuse_restricted
from cpulaunch.cli.run.facts import gather
from cpulaunch.cli.run.plan_text import notes_of, placement_as_text, sentence
from cpulaunch.config.config import Config
from cpulaunch.discovery.collect import listed_hosts
from cpulaunch.errors import CpulaunchError, HostError, UsageError
from cpulaunch.model.facts import Facts
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Program
from cpulaunch.plan.select import check_restarts, ranks_per_host
from cpulaunch.queues.base import Job, Part, Queue
from cpulaunch.wording import counted


def check_job(queue: Queue, job: Job, options: argparse.Namespace) -> None:
    """Raise the error that `cpulaunch run` would raise in the job: UsageError, ConfigError or PlanError.

    ``options``: the parsed options of `run`.
    """
    config = job.config
    check_restarts(config)
    hosts = queue.hosts(job, None)
    if len(hosts) > 1:
        refuse_restricted(options)
        if config.launcher == "local":
            where = config.where(Config.launcher)
            why = f"{where}: all ranks would be on the first of {len(hosts)} nodes"
            raise UsageError(why, hint="leave it out")
    tasks, total = sum(host.slots or 0 for host in hosts), config.hosts.nproc
    if tasks and total != "auto" and total != tasks and config.hosts.nproc_per_node == "auto":
        raise UsageError(
            f"{config.where(Config.hosts.nproc)}: {counted(total, 'rank')}, but "
            f"{queue.program}'s options request {counted(tasks, 'task')}, and each task is a rank",
            hint="leave one of the two out",
        )
    ranks_per_host(config, hosts)


def plan_lines(
    queue: Queue, job: Job, program: Program, facts: Path | None, lscpu: Path | None
) -> Iterator[str]:
    """Yield the lines of the job's plan, or the reason why there is no plan.

    ``facts`` or ``lscpu``: a file that describes the nodes; by default, the queue describes them.  Raises
    ConfigError if the file is invalid, and PlanError if the job can't run on its nodes.
    """
    config = job.config
    if facts or lscpu:
        recorded = gather(config, facts_file=facts, lscpu_file=lscpu)
        yield from _lines(queue, job, program, replace(recorded, hosts={}))
        return
    try:
        nodes = queue.nodes(job)
    except HostError as e:
        yield from _warnings(queue.part(job, None))
        yield f"no plan is shown, as {queue.title} doesn't describe the nodes ({e}); --facts F describes them"
        return
    if nodes is None:
        return
    ccl_missing = ensure_ccl(config, build=False, tell=lambda line: None)
    described = Facts(nodes.facts, ccl_missing=ccl_missing, like_what=nodes.what)
    try:
        yield from _lines(queue, job, program, described)
    except CpulaunchError as e:
        # This is no error, because the actual nodes may differ from the queue's description.
        yield f"warning: on {nodes.what}, the job would fail: {e}"


def _lines(queue: Queue, job: Job, program: Program, facts: Facts) -> Iterator[str]:
    """Yield the lines of the plan for the job's share of nodes like ``facts.like``."""
    config, topology = job.config, facts.like.topology
    hosts, part = queue.hosts(job, len(topology.cpus)), queue.part(job, len(topology.cpus))
    yield from _warnings(part)
    if part:
        facts = replace(facts, like=replace(facts.like, topology=topology.first(part.cpus)))
    if config.hosts.list or config.hosts.hostfile:
        hosts = listed_hosts(config, lambda line: None)
    facts = replace(facts, listed=hosts, step=queue.starts_steps)
    plan = make_plan(config, facts, program)
    yield sentence(plan)
    yield from placement_as_text(plan, facts.like_what)
    yield from (f"note: {note}" for note in notes_of(plan, config.output.verbose))


def _warnings(part: Part | None) -> Iterator[str]:
    if part and part.warning:
        yield f"warning: {part.warning}"
