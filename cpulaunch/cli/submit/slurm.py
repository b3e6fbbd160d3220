"""``cpulaunch submit`` for Slurm: the plan, and a batch script for sbatch; then what becomes of the job."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

from cpulaunch.cli.files import keep
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser
from cpulaunch.cli.run.command import program_of
from cpulaunch.cli.run.each import read_each
from cpulaunch.cli.submit.checks import check_job, check_logs, missing_nodes
from cpulaunch.cli.submit.follow import follow, how_to_watch, logs_before
from cpulaunch.cli.submit.job_plan import planned_lines
from cpulaunch.config.config import Config
from cpulaunch.discovery.batch.slurm import ask_slurm
from cpulaunch.discovery.batch.step import NAME as SRUN
from cpulaunch.errors import UsageError
from cpulaunch.manifests.sbatch import appends, batch_script
from cpulaunch.manifests.sbatch_options import check_counts, demand_time, warned
from cpulaunch.plan.instances import as_instances

NAME = "slurm"
"""What --to calls it."""

OWN = ("--follow", "--facts", "--lscpu")
"""Options that are for Slurm alone, and not for the job."""


def add_options(parser: Parser) -> set[str]:
    """The options that are for Slurm alone, and the names of those that aren't for the job."""
    parser.add_argument(
        "--follow", action="store_true", help="show what the job prints until it ends, and end as it does"
    )
    return set(OWN)


def refuse_options(options: argparse.Namespace, queue: str) -> None:
    """Raise UsageError where such an option was given for another queue."""
    for name in OWN:
        if getattr(options, name[2:]):
            raise UsageError(f"{name} is for Slurm, and this job is for {queue}", hint="leave it out")


def submit(
    options: argparse.Namespace, config: Config, sbatch: list[str], run: list[str], rest: list[str]
) -> int:
    """Show the plan, and print the script, keep it or hand it to sbatch; returns the exit code.

    ``sbatch`` are its options, ``run`` those of `cpulaunch run`, and ``rest`` the program.
    """
    asked = dict(word.partition("=")[::2] for word in sbatch)
    if options.follow and "--array" in asked:
        raise UsageError("--follow is for one job, and --array makes several", hint="leave out one of them")
    check_counts(asked)
    each = read_each(options.each) if options.each else ()
    program = replace(program_of(rest, options.no_python, options.wdir), each=each)
    config = as_instances(config, len(each))
    added = missing_nodes(config, asked)
    grace = config.watch.grace_period if config.is_set(Config.watch.grace_period) else None
    if warning := warned(asked, grace, by_srun=config.launcher == SRUN):
        added |= {} if "--signal" in asked else {"--signal": warning.signal}
        run = run if grace is not None else [f"--grace-period={warning.grace:g}", *run]
    if "--requeue" in asked:
        run = ["--set=watch.restartable=true", *run]
        if warning:
            demand_time(asked, warning)
    asked |= added
    check_logs(asked)
    check_job(options, config, asked)
    sbatch = [*sbatch, *(f"{name}={value}" for name, value in added.items())]
    script = batch_script(sbatch, [sys.executable, "-m", "cpulaunch", "run", *run, *rest])
    for line in planned_lines(config, program, asked, options.facts, options.lscpu):
        say(line)
    if options.output:
        keep(options.output, script)
    if options.dry_run:
        print(script, end="")
        return 0
    before = logs_before(asked)
    job = _submit(script)
    os.chdir(options.start)  # to which the path of the log is shown
    watch = how_to_watch(job, array=asked if "--array" in asked else None)
    say(f"Slurm job {job}: {watch}")
    if not options.follow:
        return 0
    try:
        return follow(job, before, appends=appends(asked))
    except KeyboardInterrupt:
        say(f"Slurm job {job} goes on: {watch}")
        return 130


def _submit(script: str) -> str:
    """The number of the job.  Raises HostError."""
    hint = "--dry-run prints the script, to be submitted elsewhere"
    said = ask_slurm(["sbatch", "--parsable"], text=script, hint=hint, tell=say)
    return said.strip().partition(";")[0]  # the cluster's name may follow
