"""``cpulaunch run``: settings and facts → plan → commands → outcome, or a dry run that stops earlier."""

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
from typing import TYPE_CHECKING, Any

from cpulaunch.cli import habits
from cpulaunch.cli.main import say
from cpulaunch.cli.options import (
    Parser,
    add_settings,
    load_config,
    refuse_restricted,
    tell_of_restricted,
)
from cpulaunch.cli.run.each import add_each, instances_of
from cpulaunch.cli.run.misuse import (
    reads_arguments,
    refuse_launcher,
    refuse_several_programs,
    refuse_shell_script,
    refuse_within_a_launcher,
    went_astray,
)
from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.config.values import HostCount
from cpulaunch.errors import SAVED_EXIT_CODE, HostError, UsageError
from cpulaunch.launchers.command import PORT_UNWATCHED, Command, shell
from cpulaunch.model.facts import Facts
from cpulaunch.plan.instances import are_wanted
from cpulaunch.plan.plan import Plan, Program
from cpulaunch.plugins import ENGINE_PACKAGES

if TYPE_CHECKING:
    from cpulaunch.supervise.output.directory import JobDirectory
    from cpulaunch.supervise.output.lines import Output

SLOW_DISK = 2.0
"""Seconds after which a line reports the wait for the disk to make the job's directory."""

BEGINNING = 1024
"""Bytes at a script's start that show its language."""

LAST_WORDS = 1.0
"""Seconds that terminal and disk have to take the remaining output of an interrupted job."""

MODULE = ("-m", "--module")

FRUITLESS = 3
"""Maximum times that Slurm requeues a job that a signal ends before its first step.  Without a limit, a job
whose steps can't be seen, or that makes none, would come back forever."""

USAGE = """cpulaunch run [OPTIONS] train.py [ARGS…]
       cpulaunch run [OPTIONS] -m module [ARGS…]
       cpulaunch run [OPTIONS] --no-python prog [ARGS…]"""
EPILOG = """\
Everything after the script is passed to it.
Settings: command line > environment > YAML > detected.

examples:
  cpulaunch run -n 2 train.py --lr 0.1             two ranks on this machine
  cpulaunch run -f hostfile -ppn 4 train.py        four ranks on each host
  cpulaunch run -f hostfile --dry-run train.py     only show what would be done
  cpulaunch run --instances auto infer.py          a program per NUMA node

exit code: 0; that of the first rank that failed, or 128 + its signal;
2 wrong usage or settings; 3 a host is not ready; 4 a host was lost, or the job
stalled; 75 saved at a signal; 130 interrupted
"""


def main(arguments: list[str]) -> int:
    parser = run_parser()
    split = partial(parser.split, ends=MODULE)
    words, rest = split(arguments)
    typed = arguments[: len(arguments) - len(rest)]
    if rest and rest[0] in MODULE:  # options may follow it, as in torchrun
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
    _tell_of_ranks(config, words)
    program = replace(program_of(rest, options.no_python, options.wdir), each=each)
    if config.watch.profile != "none" and not program.python:
        why = f"{config.where(Config.watch.profile)}: a program that is not Python makes no steps to trace"
        raise UsageError(why, hint="leave out --no-python, or --profile")
    if config.watch.telemetry != "none" and config.watch.telemetry.tensorboard and not options.dry_run:
        from cpulaunch.supervise.telemetry.sinks.tensorboard import summary_writer

        summary_writer()  # an error comes before anything is built or asked
    alike = parser.own_options(rest[1:])
    if alike and program.python and rest[0] not in MODULE and not reads_arguments(options.wdir / rest[0]):
        say(went_astray(alike))
    if config.watch.restartable and not options.dry_run:
        with _signals_lose_nothing():
            return _plan_and_run(options, config, program, alike)
    return _plan_and_run(options, config, program, alike)


def _tell_of_ranks(config: Config, words: Sequence[str]) -> None:
    """Report that ranks are started, if an option is of a program that runs a script without ranks."""
    hosts = Config.hosts
    asked: tuple[Setting[Any], ...] = (
        Config.instances.count,
        hosts.nproc,
        hosts.nproc_per_node,
        hosts.nnodes,
        hosts.list,
        hosts.hostfile,
    )
    if are_wanted(config) or any(map(config.is_set, asked)):
        return
    if found := habits.of_run_cpu(words):
        option, programs = found
        say(
            f"{option} is an option of {programs}; without --instances, this starts ranks of one job: "
            "--instances 1 starts one independent program"
        )


@contextmanager
def _signals_lose_nothing() -> Iterator[None]:
    """Handle a signal before the ranks run like one before their first step: nothing is lost."""
    from cpulaunch.supervise.attempts.attempt import let_signals_raise
    from cpulaunch.supervise.job.outcome import WARNING

    let_signals_raise()
    try:
        yield
    except SystemExit as e:
        if e.code not in {128 + number for number in WARNING} or not _may_come_back(int(e.code)):
            raise
        say("interrupted before the ranks were started; nothing is lost if it is started again")
        raise SystemExit(SAVED_EXIT_CODE) from None


def _may_come_back(exit_code: int) -> bool:
    """Return whether a job that a signal ended before its first step may be requeued; log why not.

    ``exit_code`` is the exit code that it ends with otherwise.
    """
    from cpulaunch.discovery.batch.allocation import times_requeued

    requeued = times_requeued(os.environ)
    if requeued < FRUITLESS:
        return True
    say(
        f"Slurm has requeued this job {requeued} times, and again it has made no step of torch.optim: it "
        f"ends with {exit_code}, not {SAVED_EXIT_CODE}, so that it is not requeued forever"
    )
    return False


def _plan_and_run(options: argparse.Namespace, config: Config, program: Program, alike: Sequence[str]) -> int:
    """Plan and run.  ``alike``: the script's options that `cpulaunch run` also has."""
    from cpulaunch import launchers
    from cpulaunch.cli.backend import ensure_kernels, ensure_oneccl, is_to_be_built
    from cpulaunch.cli.run.facts import gather, measured_plan
    from cpulaunch.discovery.host.installation import installation_here
    from cpulaunch.plan.make import make_plan

    ask = None if options.dry_run or options.facts or options.lscpu else program
    if ask and is_to_be_built(config):  # errors of the job are reported first
        make_plan(config, gather(config, tell=lambda line: None), program)
    facts = gather(config, facts_file=options.facts, lscpu_file=options.lscpu, program=ask)
    if facts.mpis is None and not options.dry_run:
        raise UsageError(
            "--facts and --lscpu describe other machines: only a dry run can plan for them",
            hint="add --dry-run",
        )
    if options.dry_run:
        plan = make_plan(config, facts, program)
    else:
        plan, facts = measured_plan(config, facts, program)
    if ask and (missing := ensure_oneccl(config, plan)):
        say(f"warning: the hosts' fast cards stay unused: {missing}")
        config = config.put(Config.ccl.transport, "tcp")
        plan = make_plan(config, facts, program, plan.precision)
    if ask and program.python and not are_wanted(config) and (missing := ensure_kernels(config)):
        say(
            f"training steps are torch's alone, without cpulaunch's kernels: {missing} "
            "(--engine torch leaves them out)"
        )
        config = config.put(Config.training.engine, "torch")
        plan = make_plan(config, facts, program, plan.precision)
    if len(plan.hosts) > 1:
        refuse_restricted(options)
    tell_of_restricted(options)
    if config.cpu.threads != "auto":
        from cpulaunch.cli.run.plan_text import crowded

        for warning in crowded(config, plan):
            say(f"warning: {warning}")
    package = ENGINE_PACKAGES.get(config.training.engine)
    if package and find_spec(package) is None:
        where = config.where(Config.training.engine)
        say(f"warning: {where}: {package} is not installed here, so ranks use the engine native")
    commands = launchers.load(plan.launcher).commands(plan, installation_here())
    if options.dry_run:
        from cpulaunch.cli.run.plan_text import plan_as_json, plan_as_text

        if options.format == "json":
            print(plan_as_json(plan, commands))
        elif options.format == "shell":
            port, ports = config.hosts.master_port, config.hosts.ports or [PORT_UNWATCHED]
            print(shell(commands, ports[-1] if port == "auto" else port), end="")
        else:
            text = plan_as_text(plan, commands, _picture(plan, facts), like=facts.like_what,
                                verbose=config.output.verbose)  # fmt: skip
            print(text, end="")
        return 0
    return _run(plan, commands, config, facts, program, alike)


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
    parser.add_argument("--dry-run", action="store_true", help="show the plan, and start nothing")
    parser.add_argument("--format", choices=("text", "json", "shell"), help="how --dry-run prints the plan")
    parser.add_argument("--no-python", action="store_true", help="the program is not a Python script")
    parser.add_argument(
        "--wdir", metavar="DIR", type=Path, default=Path(),
        help="working directory of the ranks, to which the script's path is relative; default: this one",
    )  # fmt: skip
    parser.add_rare(
        "--facts", metavar="F", type=Path, help="plan for the hosts that this facts file describes"
    )
    parser.add_rare(
        "--lscpu",
        metavar="F",
        type=Path,
        help="plan for hosts that this output of lscpu -p=CPU,CORE,SOCKET,NODE,MAXMHZ describes",
    )
    add_each(parser)
    return parser


def program_of(rest: list[str], no_python: bool, wdir: Path) -> Program:
    """Return the program that every rank runs, from the words after the options.  Raises UsageError."""
    if not rest or (rest[0] in MODULE and len(rest) < 2):
        raise UsageError("no script to run", hint="cpulaunch run [OPTIONS] train.py [ARGS…]")
    try:
        directory = Path.cwd() / wdir
    except FileNotFoundError:
        raise UsageError("the working directory has been deleted", hint="cd to one that exists") from None
    if not directory.is_dir():
        raise UsageError(f"--wdir {wdir}: no such directory", hint="ranks run in it, on every host")
    python = sys.executable
    if no_python:
        from shutil import which

        found = which(directory / rest[0] if "/" in rest[0] else rest[0])
        if found is None:
            raise UsageError(
                f"{rest[0]}: no such program, or it is not executable",
                hint="a program in this directory is ./prog",
            )
        argv = [str(Path(found).absolute()), *rest[1:]]
    elif rest[0] in MODULE:
        argv = [python, "-m", *rest[1:]]
    else:
        _check_script(directory, rest[0])
        argv = [python, *rest]
    return Program(tuple(argv), not no_python, str(directory), python)


def is_program(path: Path) -> bool:
    """Return whether ``path`` may name a program: there is no such file, or it is executable."""
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
            refuse_shell_script(shown, file.read(BEGINNING))
    except IsADirectoryError:
        if (path / "__main__.py").is_file():
            return  # Python runs such a directory
        raise UsageError(f"{shown} is a directory, not a script", hint="name the script in it") from None
    except FileNotFoundError:
        if shown == "-":
            what = "stdin holds no script for several ranks, as only one of them reads it"
            raise UsageError(what, hint="write the script to a file first") from None
        hint = f"did you mean -m {shown}?" if path.suffix != ".py" and "/" not in shown else None
        raise UsageError(f"{shown}: no such script in {directory}", hint=hint) from None
    except OSError as e:
        raise UsageError(f"{shown}: cannot be read: {e.strerror}", hint="check its permissions") from None


def _run(
    plan: Plan,
    commands: Sequence[Command],
    config: Config,
    facts: Facts,
    program: Program,
    alike: Sequence[str],
) -> int:
    from cpulaunch.cli.run.misuse import complained_of
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

    everything = tee == "all" and config.is_set(Config.output.tee)  # set by the user or a file
    output = Output(directory, shown, screen, tell, fold=not everything, names=plan.names)
    if sys.stdout is not None and sys.stdout.isatty() and not everything:
        output.hide_metrics()  # a terminal shows totals at the end; a pipe gets all
    _suit_terminals(output, config.output.stdin)

    sinks = make_sinks(plan, directory, attempt.job_id, tell)
    console = Console(directory, output, tell, verbose, sinks)

    following = None
    if plan.settings.watch.max_restarts and plan.settings.watch.restart_on != "never":
        from cpulaunch.cli.run.replan import Replanner
        from cpulaunch.supervise.attempts.next_attempt import Following

        following = Following(plan, Replanner(config, facts, program, plan.precision, tell), console)

    def meanwhile() -> None:
        from cpulaunch.cli.run.plan_text import headline, plan_as_json

        for line in headline(plan, directory.path, verbose):
            tell(line)
        # Both contain the values of `env:`, which others must not read.
        output.logs.append("plan.json", plan_as_json(plan, commands).encode(), private=True)
        output.logs.append("command.sh", os.fsencode(shell(commands, attempt.master_port)), private=True)

    try:
        outcome = execute(attempt, console, meanwhile, following)
        if config.watch.restartable:
            again = outcome.if_restartable()
            if again.began or _may_come_back(outcome.exit_code):
                outcome = again
    except BaseException:
        output.logs.close(LAST_WORDS)
        screen.close(LAST_WORDS)
        raise
    output.logs.write_whole("outcome.json", outcome.to_text().encode())
    patience = LAST_WORDS if outcome.kind == INTERRUPTED else HUNG
    written = all([output.logs.close(patience), *(sink.close(patience) for sink in sinks)])
    if not written:
        tell(f"{directory.path} does not answer: its files are not complete")
    if outcome.kind != OK:
        from cpulaunch.supervise.output.failure_box import failure_report

        readable = directory if written else None
        screen.say(failure_report(outcome, readable, output.last_output, plan.names))
    first = outcome.first_failure
    if first and first.rank is not None and (unknown := complained_of(output.last_output(first.rank), alike)):
        tell(went_astray(unknown))
    if outcome.metrics:
        from cpulaunch.supervise.telemetry.metrics import metrics_table

        screen.say(metrics_table(outcome.metrics, plan.noun))
    screen.close(LAST_WORDS if outcome.kind == INTERRUPTED else None)
    return outcome.exit_code


def _suit_terminals(output: Output, reader: int) -> None:
    """Show the output of the rank that reads our terminal, and merge equal lines there."""
    if sys.stdin is not None and sys.stdin.isatty():
        output.reader = reader
    for number, stream in enumerate((sys.stdout, sys.stderr), 1):
        if stream is not None and stream.isatty():
            output.fold_pairs(number)


def _job_directory(log_dir: Path, job_id: str) -> JobDirectory:
    from threading import Timer

    from cpulaunch.supervise.output.directory import JobDirectory

    waiting = Timer(
        SLOW_DISK, say, [f"waiting for {log_dir}, which does not answer; --log-dir names another"]
    )
    waiting.daemon = True
    with suppress(RuntimeError):  # if no thread may be started, later errors report it
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
    """Return a temporary job directory, as ``log_dir`` can't hold one.  Raises HostError if that fails."""
    from cpulaunch.supervise.output.directory import JobDirectory, temporary_places

    for place in temporary_places():
        with suppress(OSError):
            return JobDirectory.make_temporary(place, job_id)
    raise HostError(
        f"{log_dir} can't be written ({why_not_there}), and neither can a temporary directory",
        hint="--log-dir names a directory for the job's files",
    )
