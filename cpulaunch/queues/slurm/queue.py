"""The queue Slurm: it prepares, renders, submits and follows jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cpulaunch.config.config import Config
from cpulaunch.discovery.batch.step import NAME as SRUN
from cpulaunch.errors import UsageError
from cpulaunch.model.hosts import Host
from cpulaunch.queues.base import Job, Nodes, Part, Queue, Submitted, Tell, call
from cpulaunch.queues.slurm.checks import check_environment, check_hosts, check_logs, missing_nodes
from cpulaunch.queues.slurm.follow import follow, how_to_watch, logs_before
from cpulaunch.queues.slurm.nodes import facts_of, failure, nodes_of_partition
from cpulaunch.queues.slurm.options import OPTIONS, SHARES, demand_time, share, time_limit_warning
from cpulaunch.queues.slurm.script import appends, batch_script, options_of

HELP = """\
Options of sbatch, such as --nodes, --time, -p, --requeue, become #SBATCH lines.  Options of `cpulaunch run`
apply to the job.  Write options of sbatch that cpulaunch doesn't know as --name=value.
Without --cpus-per-task, --ntasks, --mem or --exclusive, the job gets whole nodes.
With --requeue, it gets a signal before its time limit, saves (cpulaunch.Checkpoint), is requeued and resumes.

examples:
  cpulaunch submit --nodes 4 --time 2:00:00 -p batch train.py --lr 0.1
  cpulaunch submit --nodes 4 --time 12:00:00 --requeue --checkpoint-every 10m train.py
  cpulaunch submit --nodes 4 -ppn 2 --follow train.py             show the job's output
  cpulaunch submit --nodes 4 -ppn 2 --dry-run train.py            only show the plan, and print the script
"""

MANY = 1 << 20
"""The assumed number of CPUs of an unknown node: enough for any number of tasks."""


@dataclass(frozen=True, kw_only=True)
class _Submitted(Submitted):
    asked: Mapping[str, str]  # sbatch's options
    before: Mapping[Path, os.stat_result]  # the result of `logs_before`


class Slurm(Queue):
    """Renders jobs as batch scripts, and submits them with sbatch."""

    name = "slurm"
    title = "Slurm"
    program = "sbatch"
    options = OPTIONS
    help = HELP
    passes_through = True
    follows = True
    starts_steps = True
    directory_option = "--chdir"
    log_option = "--output"

    def prepare(self, job: Job) -> Job:
        """Add the job's name, its number of nodes, and the signal before its time limit."""
        asked, config, run = dict(job.asked), job.config, job.run
        for name in ("--wrap", "--test-only"):
            if name in asked:
                hint = "name the script, as in cpulaunch submit train.py; --dry-run shows the plan"
                raise UsageError(f"submit doesn't support {name}", hint=hint)
        if job.follow and "--array" in asked:
            why = "--follow can show only one job, but --array creates several"
            raise UsageError(why, hint="omit one of them")
        options = list(job.options)
        if "--job-name" not in asked:
            options.insert(0, ("--job-name", job.title))
        if "--chdir" in asked:  # already the current directory
            options = [*(o for o in options if o[0] != "--chdir"), ("--chdir", str(Path.cwd()))]
        added = missing_nodes(config, asked)
        grace = config.watch.grace_period if config.is_set(Config.watch.grace_period) else None
        if warning := time_limit_warning(asked, grace, by_srun=config.launcher == SRUN):
            added |= {} if "--signal" in asked else {"--signal": warning.signal}
            run = run if grace is not None else (f"--grace-period={warning.grace:g}", *run)
        if "--requeue" in asked:
            run = ("--set=watch.restartable=true", *run)
            if warning:
                demand_time(asked, warning)
        job = replace(job, options=(*options, *added.items()), run=run)
        check_logs(job.asked)
        check_hosts(config, job.asked)
        check_environment(config)
        return job

    def hosts(self, job: Job, cpus: int | None) -> tuple[Host, ...]:
        tasks = share(job.asked, MANY if cpus is None else cpus).tasks
        return tuple(Host(f"node{number}", count or None) for number, count in enumerate(tasks, 1))

    def nodes(self, job: Job) -> Nodes:
        nodes = nodes_of_partition(job.asked)
        return Nodes(facts_of(nodes), f"the nodes of {nodes}")

    def part(self, job: Job, cpus: int | None) -> Part | None:
        cpus_per_node = share(job.asked, MANY if cpus is None else cpus).cpus
        if cpus_per_node is None:
            return None
        # A single CPU is a small part of any node, even of an unknown one.
        if "--cpus-per-task" in job.asked or (cpus_per_node > 1 if cpus is None else cpus_per_node >= cpus):
            return Part(cpus_per_node)
        why = " and ".join(name for name in SHARES if name in job.asked)
        what = "1 CPU" if cpus is None else f"{cpus_per_node} of {cpus} CPUs"
        return Part(
            cpus_per_node,
            f"with {why}, Slurm gives the job {what} of a node: use --exclusive for whole nodes, or "
            "--cpus-per-task for more CPUs",
        )

    def render(self, job: Job) -> str:
        return batch_script(job.options, [sys.executable, "-m", "cpulaunch", "run", *job.run, *job.words])

    def submit(self, document: str, tell: Tell) -> Submitted:
        asked = options_of(document)
        before = logs_before(asked)
        waits = "--wait" in asked  # then sbatch's exit code is the job's
        hint = "use --dry-run to print the script, and submit it on another machine"
        argv = ["sbatch", "--parsable"]
        done = call(argv, text=document, hint=hint, **({"timeout": None} if waits else {}))
        if done.returncode and not (waits and done.stdout):
            raise failure("sbatch", done)
        for line in done.stderr.splitlines():
            tell(line)
        number = done.stdout.strip().partition(";")[0]  # the cluster's name may follow
        return _Submitted(number, f"Slurm job {number}", done.returncode, asked=asked, before=before)

    def watch(self, job: Submitted) -> Sequence[str]:
        assert isinstance(job, _Submitted)
        return (how_to_watch(job.id, array=job.asked if "--array" in job.asked else None),)

    def follow(self, job: Submitted, tell: Tell) -> int:
        assert isinstance(job, _Submitted)
        return follow(job.id, job.before, tell, appends=appends(job.asked))


SLURM = Slurm()
