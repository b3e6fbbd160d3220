"""``cpulaunch jobs``: lists the user's running jobs with their progress, and how earlier jobs ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cpulaunch.cli.jobs.selection import (
    Running,
    printable,
    running_jobs,
    runs,
    usual_places,
    with_displaced,
)
from cpulaunch.cli.options import Parser
from cpulaunch.errors import SAVED_EXIT_CODE, HostError
from cpulaunch.report.read import program_in
from cpulaunch.report.secrets import masked_command
from cpulaunch.supervise.control.client import Observer
from cpulaunch.supervise.control.observer_messages import Status
from cpulaunch.supervise.control.registry import (
    has_other_network,
    is_gone,
    is_here,
    is_stopped,
    read_contact,
)
from cpulaunch.supervise.job.outcome import INTERRUPTED, OK, STALLED, START_FAILED
from cpulaunch.supervise.job.status import duration
from cpulaunch.supervise.output.lines import ORDER
from cpulaunch.supervise.output.record import (
    EVENTS,
    OUTCOME,
    PLAN,
    State,
    ended,
    jobs_below,
    names_of,
    read_document,
    state_of,
)
from cpulaunch.supervise.telemetry.metrics import in_brief
from cpulaunch.wording import counted

EPILOG = """\
Lists your running jobs that were started on this host, in any directory, and all jobs in DIR, including jobs
that had to use a temporary directory because they could not write to DIR.

examples:
  cpulaunch jobs
  cpulaunch jobs /shared/runs
"""

_STATES = {OK: "ok", INTERRUPTED: "interrupted", STALLED: "stalled", START_FAILED: "not started"}


def main(arguments: list[str]) -> int:
    parser = Parser("cpulaunch jobs", "List your running jobs, and how earlier jobs ended.", EPILOG)
    parser.add_argument(
        "directories",
        metavar="DIR",
        nargs="*",
        type=Path,
        help="a job's directory, or a directory of jobs; default: the setting output.log_dir",
    )
    options = parser.parse_args(arguments)
    named = [place for given in options.directories for place in with_displaced(given)]
    directories = named or usual_places()
    running = [each for each in running_jobs(directories) if not is_gone(each[1])]
    for each in running:
        print(printable("\n".join(_running(each))))
    shown = {os.path.realpath(directory) for directory, _ in running}
    below = {os.path.realpath(job): job for directory in directories for job in jobs_below(directory)}
    others = [job for place, job in below.items() if place not in shown]
    for job in others:
        print(printable(_line(job)))
    if not running and not others:
        where = ", ".join(map(str, options.directories)) or f"{runs()}/"
        print(f"no running job of yours here, and no job in {where}")
    return 0


def _running(running: Running) -> Iterator[str]:
    directory, contact = running
    if is_stopped(contact):
        yield f"{contact.job}  its launcher is stopped: `fg` or `kill -CONT {contact.pid}` continues it"
        yield from _where(running)
        return
    try:
        with Observer(contact) as observer:
            where = "" if is_here(contact) else f" · launched on {contact.host}"
            status = observer.status()
        yield f"{contact.job}  {_status_text(status, names_of(directory).noun)}{where}"
        if status.stalled:
            yield f"    {status.stalled}"
    except HostError as e:
        what = "can't be reached from here" if has_other_network(contact) else "does not answer"
        yield f"{contact.job}  {what}: {e.hint}"
    yield from _where(running)


def _where(running: Running) -> Iterator[str]:
    directory, contact = running
    yield f"    {directory}"
    yield f"    {masked_command(contact.command)}"


def _status_text(status: Status, noun: str) -> str:
    parts = [status.state, f"{counted(status.hosts, 'host')}, {counted(status.ranks, noun)}"]
    if status.running < status.ranks:
        parts[1] += f" ({status.running} up)"
    parts.append(duration(status.seconds))
    if status.restarts:
        parts.append(counted(status.restarts, "restart"))
    for number, noun, rate in (
        (status.steps, "step", status.step_rate),
        (status.collectives, "collective", status.collective_rate),
    ):
        if number:
            parts.append(counted(number, noun) + (f" ({rate:.3g}/s)" if rate else ""))
    if status.rates:
        parts.append(f"{status.rates} so far")
    return " · ".join(parts)


def _line(directory: Path) -> str:
    """Return a line about a job that is not among the running jobs."""
    outcome = read_document(directory / OUTCOME)
    if outcome is None:
        parts = [*_unfinished_status(directory)]
    else:
        names = names_of(directory)
        end = ended(outcome, names)
        state = _STATES.get(end.kind, "failed")
        if outcome.get("exit_code") == SAVED_EXIT_CODE and end.kind == INTERRUPTED and end.steps:
            state += ", its state saved"
        if end.why:
            state += f": {end.brief}"
        parts = [state, f"{counted(end.hosts, 'host')}, {counted(end.ranks, names.noun)}"]
        parts.append(duration(end.seconds))
        if end.steps:
            parts.append(counted(end.steps, "step") + (f" ({end.rate:.3g}/s on average)" if end.rate else ""))
        if end.metrics:
            parts.append(in_brief(end.metrics))
        if end.restarts:
            parts.append(counted(end.restarts, "restart"))
    if program := program_in(read_document(directory / PLAN) or {}):
        parts.append(program)
    return f"{directory}  {' · '.join(parts)}"


def _unfinished_status(directory: Path) -> Iterator[str]:
    """Yield what is known of a job without an outcome."""
    contact = read_contact(directory)
    if state_of(directory) is State.RUNNING:
        yield "running"  # the job has just started
    elif contact:
        yield f"launcher killed: process {contact.pid} is gone"
        last = max((_changed(directory / name) for name in (EVENTS, ORDER)), default=0.0)
        if last > contact.started:
            yield f"last output after {duration(last - contact.started)}"
    else:
        yield "no record of its end"


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
