"""``cpulaunch submit``: submits a batch script or job that calls ``cpulaunch run`` to a queue."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from cpulaunch import queues
from cpulaunch.cli.files import write_and_report
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser, load_config
from cpulaunch.cli.run.command import MODULE, is_program, program_of, run_parser, working_directory
from cpulaunch.cli.run.each import read_each
from cpulaunch.cli.run.misuse import refuse_launcher
from cpulaunch.cli.submit.job_plan import check_job, plan_lines
from cpulaunch.errors import UsageError
from cpulaunch.plan.instances import as_instances
from cpulaunch.queues.base import Job, Option, Queue

OWN = ("--to", "--output", "--dry-run", "--follow", "--facts", "--lscpu")
"""Options of this command itself: neither the queue nor `cpulaunch run` in the job gets them."""

USAGE = "cpulaunch submit [--to QUEUE] [QUEUE'S OPTIONS] [RUN OPTIONS] train.py [ARGS…]"
EXIT_CODES = """\
exit code: 0, or the job's own with --follow; 2 wrong usage or settings; 3 the queue refused the job;
130 --follow was interrupted
"""


def main(arguments: list[str]) -> int:
    start = working_directory()
    try:
        return _submit(arguments, start)
    finally:
        os.chdir(start)


def _submit(arguments: list[str], start: Path) -> int:
    """Show the plan; print, keep or submit the document.  Returns the exit code."""
    queue, options, job = _read(arguments)
    each = read_each(options.each) if options.each else ()
    program = program_of([*job.words], job.no_python, options.wdir) if queue.shares_files else None
    job = queue.prepare(replace(job, config=as_instances(job.config, len(each))))
    if program:
        check_job(queue, job, options)
    document = queue.render(job)
    if program:
        program = replace(program, each=each)
        for line in plan_lines(queue, job, program, options.facts, options.lscpu):
            say(line)
    if options.output:
        write_and_report(options.output, document)
    if options.dry_run:
        print(document, end="")
        return 0
    submitted = queue.submit(document, say)
    os.chdir(start)  # messages show paths relative to it
    how, *more = queue.watch(submitted) or ("",)
    for line in (f"{submitted.title}: {how}" if how else f"{submitted.title} is submitted", *more):
        say(line)
    if not options.follow:
        return submitted.exit_code
    try:
        return queue.follow(submitted, say)
    except KeyboardInterrupt:
        say(f"{submitted.title} continues: {how}")
        return 130


def _read(arguments: list[str]) -> tuple[Queue, argparse.Namespace, Job]:
    """Return the queue, the parsed options of this command and of `run`, and the job.

    Changes to the directory in which the job will run, so that relative paths are the job's.  Raises
    UsageError, also for errors that `cpulaunch run` would report.
    """
    queue, parser, others = _parser_of(arguments)
    words, rest = parser.split(arguments, ends=MODULE)
    of_queue, run, own = _split_options(words, queue, parser, others)
    options = parser.parse_args([*own, *run])
    if not rest or not rest[0] or (rest[0] in MODULE and len(rest) < 2):
        raise UsageError("no script to run", hint="cpulaunch submit [OPTIONS] train.py [ARGS…]")
    for name in () if queue.follows else ("follow",):
        _refuse(name, options, queue)
    for name in () if queue.shares_files else ("facts", "lscpu"):
        _refuse(name, options, queue)
    if options.output and "%" in str(options.output) and queue.log_option:
        of_queue.append((queue.log_option, str(options.output)))
        options.output = None
    if directory := dict(of_queue).get(queue.directory_option):
        _enter(directory, options, queue)
    if not options.no_python and is_program(options.wdir / rest[0]):
        refuse_launcher(words, rest, partial(parser.split, ends=MODULE), "submit")
    if options.output and os.path.realpath(options.wdir / rest[0]) == os.path.realpath(options.output):
        raise UsageError(f"--output {options.output} would overwrite the job's script")
    config = load_config(options)
    if options.format:
        parser.error("--format is for `cpulaunch run --dry-run`")
    job = Job(config, tuple(of_queue), tuple(run), tuple(rest), options.no_python, options.follow)
    return queue, options, job


def _refuse(name: str, options: argparse.Namespace, queue: Queue) -> None:
    if getattr(options, name):
        raise UsageError(f"--{name} is not available for {queue.title}", hint="leave it out")


def _parser_of(arguments: Sequence[str]) -> tuple[Queue, Parser, Mapping[str, str]]:
    """Return the queue that --to names, its parser, and the options of other queues, each with its queue."""
    default, *_ = names = queues.names()
    queue = queues.load(default)
    parser, others = _parser(queue, names)
    parser.passes_through = True
    words, _ = parser.split(arguments, ends=MODULE)
    to = next((word[len("--to=") :] for word in reversed(words) if word.startswith("--to=")), default)
    if to not in names:
        raise UsageError(f"--to {to}: no such queue", hint=f"--to is one of: {', '.join(names)}")
    if to != default:
        queue = queues.load(to)
        parser, others = _parser(queue, names)
    parser.passes_through = queue.passes_through
    return queue, parser, others


def _parser(chosen: Queue, names: Sequence[str]) -> tuple[Parser, Mapping[str, str]]:
    """Return the parser for the queue ``chosen``, and the options of other queues, each with its queue."""
    parser = run_parser()
    parser.prog, parser.usage = "cpulaunch submit", USAGE
    parser.epilog = "\n".join(filter(None, (chosen.help, EXIT_CODES)))
    parser.description = "Submit a job to a queue.  Accepts options of the queue and of `cpulaunch run`."
    parser.conflict_handler = parser._optionals.conflict_handler = "resolve"  # the queue's options override
    parser.add_argument("--to", choices=names, default=names[0], help="queue that runs the job")
    parser.add_argument(
        "--output", metavar="F", type=Path, help="also write the batch script or job to this file"
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="show the job's output until it ends; exit with its exit code",
    )
    parser.add_argument("--format", help=argparse.SUPPRESS)
    existing = {
        name for name, action in parser._option_string_actions.items() if action.help != argparse.SUPPRESS
    }
    existing |= {name for option in chosen.options for name in option.spellings}
    hidden, others = set[str](), dict[str, str]()
    by_options: dict[tuple[Option, ...], list[Queue]] = {}
    for queue in (chosen, *_all_but(chosen, names)):
        by_options.setdefault(queue.options, []).append(queue)
    for options, (queue, *further) in by_options.items():
        their_names = " or ".join(each.name for each in (queue, *further))
        group = parser.add_argument_group(f"{queue.title} (--to {their_names})")
        for option in options:
            new = [
                name
                for name in option.spellings
                if name not in OWN and (queue is chosen or name not in existing)
            ]
            if not new:
                continue
            value = {"metavar": option.metavar} if option.metavar else {"action": "store_true"}
            group.add_argument(*new, dest="_", help=option.help or argparse.SUPPRESS, **value)  # type: ignore[arg-type]
            hidden |= set() if option.help else {*new}
            others |= {} if queue is chosen else dict.fromkeys(new, queue.name)
    parser.shown_elsewhere = frozenset(hidden)
    parser.elsewhere = f", and {chosen.program}(1) those of {chosen.title}"
    return parser, others


def _all_but(chosen: Queue, names: Sequence[str]) -> Iterator[Queue]:
    for name in names:
        with suppress(UsageError):  # a plug-in that can't be imported; this job doesn't need it
            if name != chosen.name:
                yield queues.load(name)


def _enter(directory: str, options: argparse.Namespace, queue: Queue) -> None:
    """Change to the directory in which the job will run; make paths in our own options absolute."""
    for name in ("output", "facts", "lscpu"):
        if path := getattr(options, name):
            setattr(options, name, path.absolute())
    try:
        os.chdir(directory)
    except OSError as e:
        why = f"{queue.directory_option} {directory}: {e.strerror}"
        raise UsageError(why, hint="the job runs in this directory; create it first") from None


def _split_options(
    words: Sequence[str], queue: Queue, parser: Parser, others: Mapping[str, str]
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Return the queue's options with their long names, the options of `cpulaunch run`, and our own.

    ``others``: options of other queues, each with its queue.
    """
    of_chosen = {spelling: option for option in queue.options for spelling in option.spellings}
    of_queue, run, own = list[tuple[str, str]](), list[str](), list[str]()
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name in OWN:
            own.append(word)
        elif option := of_chosen.get(name):
            of_queue.append((option.name, value if equals or not option.metavar else left.pop(0)))
        elif word.startswith("--") and not parser.has(name):  # passed through
            of_queue.append((name, value))
        elif other := others.get(name):
            why = f"{name} is for --to {other}, and this job is for {queue.name}"
            raise UsageError(why, hint=f"leave it out, or add --to {other}")
        elif not parser.has(name) and (option := of_chosen.get(word[:2])):  # a letter with its value attached
            of_queue.append((option.name, word[2:]))
        else:
            run.append(word)
    return of_queue, run, own
