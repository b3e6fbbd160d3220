"""The plan of a job that is yet to be submitted to Slurm: what its nodes are like is assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from cpulaunch.cli.backend import ensure_ccl
from cpulaunch.cli.run.facts import gather
from cpulaunch.cli.run.plan_text import notes_of, placement_as_text, sentence
from cpulaunch.config.config import Config
from cpulaunch.discovery.batch.slurm import facts_of, nodes_of_partition
from cpulaunch.discovery.collect import listed_hosts
from cpulaunch.errors import CpulaunchError, HostError
from cpulaunch.manifests.sbatch_options import SHARES, Share, share
from cpulaunch.model.facts import Facts
from cpulaunch.model.hosts import Host
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Program


def planned_lines(
    config: Config, program: Program, options: Mapping[str, str], facts: Path | None, lscpu: Path | None
) -> Iterator[str]:
    """The plan on the nodes that sbatch's ``options`` lead to, or why none can be shown.

    ``facts`` or ``lscpu`` is a file that describes the nodes; without, Slurm does.  Raises ConfigError where
    such a file is wrong, and PlanError where no plan can be made from it.
    """
    if facts or lscpu:
        recorded = gather(config, facts_file=facts, lscpu_file=lscpu)
        asked = share(options, len(recorded.like.topology.cpus))
        yield from _lines(config, program, replace(recorded, hosts={}), asked)
        return
    try:
        nodes = nodes_of_partition(options)
    except HostError as e:
        yield f"no plan is shown, as Slurm doesn't describe the nodes ({e}); --facts F does"
        return
    asked = share(options, nodes.cpus)
    if asked.cpus and asked.cpus < nodes.cpus and "--cpus-per-task" not in options:
        part = " and ".join(name for name in SHARES if name in options)
        given = f"with {part}, Slurm gives the job {asked.cpus} of {nodes.cpus} CPUs of a node"
        yield f"warning: {given}: --exclusive gives it whole nodes, and --cpus-per-task more of each"
    described = Facts(
        facts_of(nodes, asked.cpus),
        ccl_missing=ensure_ccl(config, build=False, tell=lambda line: None),
        like_what=f"the nodes of {nodes}",
    )
    try:
        yield from _lines(config, program, described, asked)
    except CpulaunchError as e:
        # They may be others than Slurm says, so let the job find out.
        yield f"warning: on the nodes of {nodes}, it would end at once: {e}"


def _lines(config: Config, program: Program, facts: Facts, asked: Share) -> Iterator[str]:
    if config.hosts.list or config.hosts.hostfile:
        hosts = listed_hosts(config, lambda line: None)
    else:
        hosts = tuple(Host(f"node{number}", tasks or None) for number, tasks in enumerate(asked.tasks, 1))
    facts = replace(facts, listed=hosts)
    plan = make_plan(config, facts, program)
    yield sentence(plan)
    yield from placement_as_text(plan, facts.like_what)
    yield from (f"note: {note}" for note in notes_of(plan, config.output.verbose))
