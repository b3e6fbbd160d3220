"""``cpulaunch submit``: writes a batch script that calls ``cpulaunch run``, and hands it to the queue."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cpulaunch.cli.options import Parser, load_config
from cpulaunch.cli.run.command import MODULE, is_program, program_of, run_parser
from cpulaunch.cli.run.misuse import refuse_launcher
from cpulaunch.cli.submit import kubernetes, slurm
from cpulaunch.config.config import Config
from cpulaunch.errors import UsageError
from cpulaunch.manifests.sbatch_options import LOG, REFUSED, SWITCHES, VALUES

QUEUES = (slurm.NAME, kubernetes.NAME)

DIRECTORY = "--chdir"
"""sbatch's option for the directory that the job runs in."""

USAGE = """cpulaunch submit [--to slurm] [SBATCH OPTIONS] [RUN OPTIONS] train.py [ARGS…]
       cpulaunch submit --to kubernetes --image I [--nodes N] [RUN OPTIONS] train.py [ARGS…]"""
EPILOG = """\
Options of sbatch, such as --nodes, --time, -p, --requeue, become #SBATCH lines; options of `cpulaunch run`
stay those of the job.  Without --cpus-per-task, --ntasks, --mem or --exclusive, the job takes whole nodes.
With --requeue, it is warned before its time limit, saves (cpulaunch.Checkpoint), is queued anew and goes on.
For Kubernetes, --nodes is the number of workers and --job-name the job's name; a script without a leading /
travels with the job.

examples:
  cpulaunch submit --nodes 4 --time 2:00:00 -p batch train.py --lr 0.1
  cpulaunch submit --nodes 4 --time 12:00:00 --requeue --checkpoint-every 10m train.py
  cpulaunch submit --nodes 4 -ppn 2 --follow train.py             show what the job prints
  cpulaunch submit --nodes 4 -ppn 2 --dry-run train.py            only show the plan, and print the script
  cpulaunch submit --to kubernetes --image I --nodes 4 --cpu 16 --memory 64Gi train.py

exit code: 0, with --follow the job's; 2 usage or settings; 3 sbatch or kubectl refused it; 130 --follow
interrupted
"""


class Typed(NamedTuple):
    """A command line: our own options, and the settings; sbatch's options as words such as ``--nodes=4``,
    those of `run`, and the program with its arguments."""

    ours: argparse.Namespace
    config: Config
    sbatch: list[str]
    run: list[str]
    program: list[str]


def main(arguments: list[str]) -> int:
    try:
        start = os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory has been deleted", hint="cd to one that exists") from None
    try:
        return _submit(arguments)
    finally:
        os.chdir(start)  # from where the job runs


def _submit(arguments: list[str]) -> int:
    typed = read(arguments)
    if typed.ours.to == kubernetes.NAME:
        return kubernetes.submit(*typed)
    return slurm.submit(*typed)


def read(arguments: list[str]) -> Typed:
    """The command line's parts.  Raises UsageError, also for what `cpulaunch run` would refuse.

    The process is then in the directory where the job will run, so that paths mean what they will there.
    """
    parser, own = _parser()
    words, rest = parser.split(arguments, ends=MODULE)
    options = parser.parse_args(words)
    for_slurm = options.to == slurm.NAME
    if for_slurm:
        if not rest or (rest[0] in MODULE and len(rest) < 2):
            raise UsageError("no script to run", hint="cpulaunch submit [OPTIONS] train.py [ARGS…]")
        _enter(options)
    if rest and not options.no_python and is_program(options.wdir / rest[0]):
        refuse_launcher(words, rest, partial(parser.split, ends=MODULE), "submit")
    if options.output and rest and (options.wdir / rest[0]).resolve() == options.output.resolve():
        raise UsageError(f"--output {options.output} would overwrite what the job is to run")
    config = load_config(options)
    if options.format:
        parser.error("--format is for `cpulaunch run --dry-run`")
    sbatch, run = _sorted(words, own, parser)
    if not for_slurm:
        slurm.refuse_options(options, options.to)
        return Typed(options, config, sbatch, run, rest)
    kubernetes.refuse_options(options, options.to)
    if "%" in str(options.output):
        why = f"--output {options.output} keeps the script, and sbatch's patterns are for the job's log"
        raise UsageError(why, hint=f"{LOG[0]} {options.output} names the log")
    program_of(rest, options.no_python, options.wdir)
    if options.job_name is None:
        sbatch.insert(0, f"--job-name={Path(rest[1] if rest[0] in MODULE else rest[0]).stem}")
    if options.directory:
        sbatch = [word for word in sbatch if not word.startswith(f"{DIRECTORY}=")]
        sbatch.append(f"{DIRECTORY}={Path.cwd()}")
    return Typed(options, config, sbatch, run, rest)


def _parser() -> tuple[Parser, set[str]]:
    """The parser, and the options that are neither the job's nor sbatch's."""
    parser = run_parser()
    parser.prog, parser.usage, parser.epilog = "cpulaunch submit", USAGE, EPILOG
    parser.description = "Submit a job to a queue: sbatch's options, and those of `cpulaunch run`."
    parser.conflict_handler = parser._optionals.conflict_handler = "resolve"  # --exclude is sbatch's here
    own = {"--to", "--output", "--dry-run"}
    own |= slurm.add_options(parser) | kubernetes.add_options(parser)
    parser.add_argument("--to", choices=QUEUES, default=QUEUES[0], help="the queue")
    parser.add_argument("--output", metavar="F", type=Path, help="keep the script, or the job, in this file")
    kept = {"--job-name": "job_name", DIRECTORY: "directory"}
    for name, letter in VALUES.items():
        letters = [letter] if letter else []
        parser.add_argument(name, *letters, dest=kept.get(name, "_"), metavar="V", help=argparse.SUPPRESS)
    parser.add_argument(LOG[0], dest="_", metavar="V", help=argparse.SUPPRESS)
    for name in SWITCHES:
        parser.add_argument(name, dest="_", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--format", help=argparse.SUPPRESS)
    parser.shown_elsewhere = frozenset((*VALUES, *VALUES.values(), LOG[0], *SWITCHES)) - {""}
    parser.refused = REFUSED
    parser.elsewhere = ", and sbatch(1) those of Slurm"
    return parser, own


def _enter(options: argparse.Namespace) -> None:
    """Go to where the job will run, with the paths of our own options as they are here."""
    options.start = Path.cwd()
    if not options.directory:
        return
    for name in ("output", "facts", "lscpu"):
        if path := getattr(options, name):
            setattr(options, name, options.start / path)
    try:
        os.chdir(options.directory)
    except OSError as e:
        why = f"{DIRECTORY} {options.directory}: {e.strerror}"
        raise UsageError(why, hint="the job runs there, and looks for its script there") from None


def _sorted(words: Sequence[str], own: set[str], parser: Parser) -> tuple[list[str], list[str]]:
    """Those of sbatch, by their long names, and those of `cpulaunch run`; not our ``own``."""
    long_names = dict([LOG, *((letter, name) for name, letter in VALUES.items() if letter)])
    sbatch, run = [], []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name in long_names:
            sbatch.append(f"{long_names[name]}={left.pop(0)}")
        elif word[:2] in long_names and not parser.has(name):  # with its value attached
            sbatch.append(f"{long_names[word[:2]]}={word[2:]}")
        elif name in VALUES or name in SWITCHES:
            sbatch.append(name + equals + value)
        elif name not in own:
            run.append(name + equals + value)
    return sbatch, run
