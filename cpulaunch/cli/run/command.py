"""``cpulaunch run``: makes a plan from settings and facts, and runs or shows its commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cpulaunch.cli.main import say
from cpulaunch.cli.options import (
    Parser,
    add_settings,
    load_config,
    refuse_restricted,
    report_restricted,
)
from cpulaunch.cli.run.each import add_each, instances_of
from cpulaunch.cli.run.misuse import (
    misplaced_options,
    reads_arguments,
    refuse_launcher,
    refuse_several_programs,
    refuse_shell_script,
    refuse_within_a_launcher,
)
from cpulaunch.config.config import Config
from cpulaunch.config.values import HostCount
from cpulaunch.errors import SAVED_EXIT_CODE, HostError, UsageError
from cpulaunch.launchers.command import PORT_UNWATCHED, Command, shell
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.facts import Facts
from cpulaunch.plan.instances import are_wanted
from cpulaunch.plan.plan import Plan, Program
from cpulaunch.plugins import ENGINE_PACKAGES
from cpulaunch.wording import shortened

if TYPE_CHECKING:
    from cpulaunch.supervise.output.directory import JobDirectory
    from cpulaunch.supervise.output.lines import Output

SLOW_DISK = 2.0
"""Seconds after which a line reports that creating the job's directory hangs."""

HEAD_BYTES = 1024
"""Bytes of a script that are read to detect its language."""

FLUSH_TIMEOUT = 1.0
"""Seconds to write the remaining output of an interrupted job to the terminal and to files."""

MODULE = ("-m", "--module")

MAX_REQUEUES = 3
"""Maximum number of times that Slurm requeues a job that ends before its first step.

Without a limit, a job that makes no step of torch.optim would be requeued forever."""

USAGE = """cpulaunch run [OPTIONS] train.py [ARGS…]
       cpulaunch run [OPTIONS] -m module [ARGS…]
       cpulaunch run [OPTIONS] --no-python prog [ARGS…]"""
EPILOG = """\
Everything after the script is passed to it.
Precedence of settings: command line > environment > YAML > detected.

examples:
  cpulaunch run -n 2 train.py --lr 0.1             two ranks on this machine
  cpulaunch run -f hostfile -ppn 4 train.py        four ranks on each host
  cpulaunch run -f hostfile --dry-run train.py     show the plan only
  cpulaunch run --instances auto infer.py          one program per NUMA node

exit code: 0; the exit code of the first rank that failed, or 128 + its signal;
2 wrong usage or settings; 3 a host is not ready; 4 a host was lost, or the job
stalled; 75 the job has saved its state on a signal; 130 interrupted
"""


def main(arguments: list[str]) -> int:
    parser = run_parser()
    split = partial(parser.split, ends=MODULE)
    words, rest = split(arguments)
    typed = arguments[: len(arguments) - len(rest)]
    if rest and rest[0] in MODULE:  # options may follow -m, as in torchrun
        more, after = parser.split(rest[1:])
        words, typed = [*words, *more], [*typed, *rest[1 : len(rest) - len(after)]]
        rest = [rest[0], *after]
    options = parser.parse_args(words)
    refuse_several_programs(rest)
    if rest and not options.no_python and is_program(options.wdir / rest[0]):
        refuse_launcher(typed, rest, split)
    if not options.dry_run:
        refuse_within_a_launcher(os.environ)
    if options.format and not options.dry_run:
        raise UsageError("--format is for --dry-run", hint="add --dry-run, or leave out --format")
    config = load_config(options)
    for warning in config.warnings:
        say(f"warning: {warning}")
    config, each = instances_of(config, options.each)
    if config.hosts.nnodes not in ("all", HostCount(1, 1)):
        refuse_restricted(options)
    program = replace(program_of(rest, options.no_python, options.wdir), each=each)
    if config.watch.profile != "none" and not program.python:
        why = f"{config.where(Config.watch.profile)}: a program that is not Python makes no steps to trace"
        raise UsageError(why, hint="leave out --no-python, or --profile")
    if config.watch.telemetry != "none" and config.watch.telemetry.tensorboard and not options.dry_run:
        from cpulaunch.supervise.telemetry.sinks.tensorboard import summary_writer

        summary_writer()  # raises its error now, before anything is built
    shared = parser.own_options(rest[1:])
    if shared and program.python and rest[0] not in MODULE and not reads_arguments(options.wdir / rest[0]):
        say(misplaced_options(shared))
    if config.watch.restartable and not options.dry_run:
        with _requeue_on_signal():
            return _plan_and_run(options, config, program, shared)
    return _plan_and_run(options, config, program, shared)


@contextmanager
def _requeue_on_signal() -> Iterator[None]:
    """On a signal before the ranks start, exit with the code for a saved state, as nothing is lost."""
    from cpulaunch.supervise.attempts.attempt import let_signals_raise
    from cpulaunch.supervise.job.outcome import WARNING

    let_signals_raise()
    try:
        yield
    except SystemExit as e:
        if e.code not in {128 + number for number in WARNING} or not _may_requeue(int(e.code)):
            raise
        say("interrupted before the ranks were started; the job can be started again")
        raise SystemExit(SAVED_EXIT_CODE) from None


def _may_requeue(exit_code: int) -> bool:
    """Return whether a job that a signal has ended before its first step may be requeued.

    If not, report why, with the ``exit_code`` of the job.
    """
    from cpulaunch.discovery.batch.allocation import times_requeued

    requeued = times_requeued(os.environ)
    if requeued < MAX_REQUEUES:
        return True
    say(
        f"Slurm has requeued this job {requeued} times, and it has made no step of torch.optim: it exits "
        f"with {exit_code}, not {SAVED_EXIT_CODE}, so that it is not requeued forever"
    )
    return False


def _check_before_build(config: Config, program: Program) -> None:
    """Raise errors of the plan, and of hosts that aren't ready."""
    from cpulaunch.cli.run.facts import gather
    from cpulaunch.plan.make import make_plan

    lines: list[str] = []
    try:
        make_plan(config, gather(config, program=program, build=False, tell=lines.append), program)
    except HostError:
        for line in lines:
            say(line)
        raise


def _plan_and_run(
    options: argparse.Namespace, config: Config, program: Program, shared: Sequence[str]
) -> int:
    """Plan and run.  ``shared``: options of the script that `cpulaunch run` also has."""
    from cpulaunch import launchers
    from cpulaunch.cli.backend import ensure_kernels, ensure_oneccl, needs_build
    from cpulaunch.cli.run.facts import gather, measured_plan
    from cpulaunch.discovery.host.installation import installation_here
    from cpulaunch.plan.make import make_plan

    ask = None if options.dry_run or options.facts or options.lscpu else program
    if ask and needs_build(config):
        _check_before_build(config, program)
    facts = gather(config, facts_file=options.facts, lscpu_file=options.lscpu, program=ask)
    if facts.mpis is None and not options.dry_run:
        raise UsageError(
            "--facts and --lscpu describe other machines, and are only for dry runs",
            hint="add --dry-run",
        )
    if options.dry_run:
        plan = make_plan(config, facts, program)
    else:
        plan, facts = measured_plan(config, facts, program)
    if ask and (missing := ensure_oneccl(config, plan)):
        say(f"warning: the hosts' fast network cards are not used: {missing}")
        config = config.put(Config.ccl.transport, "tcp")
        plan = make_plan(config, facts, program, plan.precision)
    if ask and program.python and not are_wanted(config) and (missing := ensure_kernels(config)):
        say(
            f"training steps use torch alone, without cpulaunch's kernels: {missing} "
            "(--engine torch avoids this message)"
        )
        config = config.put(Config.training.engine, "torch")
        plan = make_plan(config, facts, program, plan.precision)
    if len(plan.hosts) > 1:
        refuse_restricted(options)
    report_restricted(options)
    if config.cpu.threads != "auto":
        from cpulaunch.cli.run.plan_text import thread_warnings

        for warning in thread_warnings(config, plan):
            say(f"warning: {warning}")
    package = ENGINE_PACKAGES.get(config.training.engine)
    if package and find_spec(package) is None:
        where = config.where(Config.training.engine)
        say(f"warning: {where}: {package} is not installed here, so ranks use the engine native")
    commands = launchers.load(plan.launcher).commands(plan, installation_here())
    if options.dry_run:
        _print_plan(options, config, plan, facts, commands)
        return 0
    return _run(plan, commands, config, facts, program, shared)


def _print_plan(
    options: argparse.Namespace, config: Config, plan: Plan, facts: Facts, commands: Sequence[Command]
) -> None:
    from cpulaunch.cli.run.plan_text import plan_as_json, plan_as_text
    from cpulaunch.supervise.output.lines import shown_ranks

    shown_ranks(config.output.tee, plan.world_size, names=plan.names)  # raises the error of the run
    if options.format == "json":
        print(plan_as_json(plan, commands))
    elif options.format == "shell":
        port, ports = config.hosts.master_port, config.hosts.ports or [PORT_UNWATCHED]
        print(shell(commands, ports[-1] if port == "auto" else port), end="")
    else:
        text = plan_as_text(plan, commands, _picture(plan, facts), like=facts.like_what,
                            verbose=config.output.verbose)  # fmt: skip
        print(text, end="")


def _picture(plan: Plan, facts: Facts) -> str:
    from cpulaunch.cli import terminal
    from cpulaunch.cli.run.preview import picture_of_first_host

    shown = sys.stdout.isatty()
    return picture_of_first_host(
        plan,
        facts,
        width=terminal.width() if shown else terminal.WIDEST,
        colour=shown and terminal.has_colour(),
        unicode=terminal.has_unicode(),
        table=False,
    )


def run_parser() -> Parser:
    parser = Parser("cpulaunch run", "Run a program on every rank.", EPILOG, USAGE)
    add_settings(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the plan without starting ranks")
    parser.add_argument("--format", choices=("text", "json", "shell"), help="format of a dry run's plan")
    parser.add_argument("--no-python", action="store_true", help="the program is not a Python script")
    parser.add_argument(
        "--wdir", metavar="DIR", type=Path, default=Path(),
        help="working directory of the ranks; the script's path is relative to it",
    )  # fmt: skip
    parser.add_rare("--facts", metavar="F", type=Path, help="plan for the hosts in this facts file")
    parser.add_rare(
        "--lscpu",
        metavar="F",
        type=Path,
        help="plan for hosts described by this output of lscpu -p=CPU,CORE,SOCKET,NODE,MAXMHZ",
    )
    add_each(parser)
    return parser


def working_directory() -> Path:
    """Return the working directory.  Raises UsageError if it has been deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory has been deleted", hint="cd to one that exists") from None


def program_of(rest: list[str], no_python: bool, wdir: Path) -> Program:
    """Return the ranks' program from the words after the options.  Raises UsageError."""
    if not rest or not rest[0] or (rest[0] in MODULE and len(rest) < 2):
        raise UsageError("no script to run", hint="cpulaunch run [OPTIONS] train.py [ARGS…]")
    directory = working_directory() / wdir
    if not directory.is_dir():
        raise UsageError(f"--wdir {wdir}: no such directory", hint="it must exist on every host")
    python = sys.executable
    if no_python:
        from shutil import which

        found = which(directory / rest[0] if "/" in rest[0] else rest[0])
        if found is None:
            raise UsageError(
                f"{rest[0]}: no such program, or it is not executable",
                hint="write ./prog for a program in this directory",
            )
        argv = [str(Path(found).absolute()), *rest[1:]]
    elif rest[0] in MODULE:
        argv = [python, "-m", *rest[1:]]
    else:
        _check_script(directory, rest[0])
        argv = [python, *rest]
    return Program(tuple(argv), not no_python, str(directory), python)


def is_program(path: Path) -> bool:
    """Return whether ``path`` may name a program: the file does not exist, or is executable."""
    return not path.exists() or (os.access(path, os.X_OK) and not path.is_dir())


def _check_script(directory: Path, shown: str) -> None:
    path = directory / shown
    try:
        if path.is_fifo():
            raise UsageError(
                f"{shown} is a pipe, which only one of the ranks could read",
                hint="write the script to a file first",
            )
        with path.open("rb") as file:
            refuse_shell_script(shown, file.read(HEAD_BYTES))
    except IsADirectoryError:
        if (path / "__main__.py").is_file():
            return  # Python runs a directory with this file
        raise UsageError(f"{shown} is a directory, not a script", hint="name the script in it") from None
    except FileNotFoundError:
        if shown == "-":
            what = "the script can't be read from stdin, which only one of the ranks could read"
            raise UsageError(what, hint="write the script to a file first") from None
        raise UsageError(f"{shown}: no such script in {directory}", hint=_instead_of(shown)) from None
    except OSError as e:
        raise UsageError(f"{shown}: cannot be read: {e.strerror}", hint="check its permissions") from None


def _instead_of(script: str) -> str | None:
    """Return a hint if ``script``, which does not exist, may be a program or a module."""
    from shutil import which

    if script.endswith(".py") or "/" in script:
        return None
    return f"did you mean {'--no-python' if which(script) else '-m'} {script}?"


def _run(
    plan: Plan,
    commands: Sequence[Command],
    config: Config,
    facts: Facts,
    program: Program,
    shared: Sequence[str],
) -> int:
    from cpulaunch.cli.run.misuse import rejected_options
    from cpulaunch.cli.terminal import has_last_line
    from cpulaunch.supervise.attempts.attempt import first_attempt
    from cpulaunch.supervise.attempts.execute import execute
    from cpulaunch.supervise.job.outcome import INTERRUPTED, OK
    from cpulaunch.supervise.output.lines import Console, Output, shown_ranks
    from cpulaunch.supervise.output.logs import HUNG
    from cpulaunch.supervise.output.terminal import Screen
    from cpulaunch.supervise.telemetry.sinks import make_sinks

    tee, verbose = config.output.tee, config.output.verbose
    shown = shown_ranks(tee, plan.world_size, names=plan.names)
    attempt = first_attempt(plan, commands, facts.free_port)
    directory = _job_directory(Path(config.output.log_dir), attempt.job_id)
    screen = Screen(status=has_last_line())

    def tell(line: str) -> None:
        screen.say(f"cpulaunch: {line}\n")

    everything = tee == "all" and config.is_set(Config.output.tee)
    output = Output(directory, shown, screen, tell, fold=not everything, names=plan.names)
    if sys.stdout is not None and sys.stdout.isatty() and not everything:
        output.hide_metrics()  # the terminal shows totals at the end
    _adapt_to_terminals(output, config.output.stdin)

    sinks = make_sinks(plan, directory, attempt.job_id, tell)
    console = Console(directory, output, tell, verbose, sinks)

    following = None
    if plan.settings.watch.max_restarts and plan.settings.watch.restart_on != "never":
        from cpulaunch.cli.run.replan import Replanner
        from cpulaunch.supervise.attempts.next_attempt import Following

        following = Following(plan, Replanner(config, facts, program, plan.precision, tell), console)

    def meanwhile() -> None:
        from cpulaunch.cli.run.plan_text import headline, plan_as_json

        for line in (*headline(plan, directory.path, verbose), *_shared_cores(plan)):
            tell(line)
        # Both contain the values of `env:`, which may be secret.
        output.logs.append("plan.json", plan_as_json(plan, commands).encode(), private=True)
        output.logs.append("command.sh", os.fsencode(shell(commands, attempt.master_port)), private=True)

    try:
        outcome = execute(attempt, console, meanwhile, following)
        if config.watch.restartable:
            again = outcome.if_restartable()
            if again.began or _may_requeue(outcome.exit_code):
                outcome = again
    except BaseException:
        output.logs.close(FLUSH_TIMEOUT)
        screen.close(FLUSH_TIMEOUT)
        raise
    output.logs.write_whole("outcome.json", outcome.to_text().encode())
    patience = FLUSH_TIMEOUT if outcome.kind == INTERRUPTED else HUNG
    written = all([output.logs.close(patience), *(sink.close(patience) for sink in sinks)])
    if not written:
        tell(f"the file system of {directory.path} hangs: the job's files are incomplete")
    if outcome.kind != OK:
        from cpulaunch.supervise.output.failure_box import failure_report

        readable = directory if written else None
        screen.say(failure_report(outcome, readable, output.last_output, plan.names))
    first = outcome.first_failure
    if (
        first
        and first.rank is not None
        and (unknown := rejected_options(output.last_output(first.rank), shared))
    ):
        tell(misplaced_options(unknown))
    if outcome.metrics:
        from cpulaunch.supervise.telemetry.metrics import metrics_table

        screen.say(metrics_table(outcome.metrics, plan.noun))
    screen.close(FLUSH_TIMEOUT if outcome.kind == INTERRUPTED else None)
    return outcome.exit_code


def _shared_cores(plan: Plan) -> Iterator[str]:
    """Yield a warning if other jobs of the user are pinned to the same cores."""
    from cpulaunch.supervise.control.registry import jobs_on

    if jobs := jobs_on(plan.pinned_here, os.environ):
        shared = CoreSet(core for cores in jobs.values() for core in cores)
        who = f"{'job' if len(jobs) == 1 else 'jobs'} {shortened([*jobs])}"
        yield f"warning: cores {shared} are already in use by {who}; --cores chooses others"


def _adapt_to_terminals(output: Output, reader: int) -> None:
    """Show output of the rank that reads the terminal at once; fold equal lines of two ranks on terminals."""
    if sys.stdin is not None and sys.stdin.isatty():
        output.reader = reader
    for number, stream in enumerate((sys.stdout, sys.stderr), 1):
        if stream is not None and stream.isatty():
            output.fold_pairs(number)


def _job_directory(log_dir: Path, job_id: str) -> JobDirectory:
    from threading import Timer

    from cpulaunch.supervise.output.directory import JobDirectory

    waiting = Timer(
        SLOW_DISK, say, [f"waiting for the file system of {log_dir}; --log-dir names another directory"]
    )
    waiting.daemon = True
    with suppress(RuntimeError):  # no thread can be started
        waiting.start()
    try:
        return JobDirectory.make(log_dir / job_id)
    except OSError as e:
        directory = _temporary_directory(job_id, log_dir, str(e.strerror))
        say(f"warning: {log_dir} can't be written ({e.strerror}); logs are in {directory.path}")
        return directory
    finally:
        waiting.cancel()


def _temporary_directory(job_id: str, log_dir: Path, why_not_there: str) -> JobDirectory:
    """Create a temporary job directory instead of one in ``log_dir``.  Raises HostError."""
    from cpulaunch.supervise.output.directory import JobDirectory, temporary_places

    for place in temporary_places():
        with suppress(OSError):
            return JobDirectory.make_temporary(place, job_id)
    raise HostError(
        f"{log_dir} can't be written ({why_not_there}), and neither can a temporary directory",
        hint="--log-dir names a directory for the job's files",
    )
