"""The jobs that a command is about: those of the user's list, and of directories that are named."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from cpulaunch.errors import UsageError
from cpulaunch.supervise.record import State, jobs_below, state_of
from cpulaunch.supervise.registry import CONTROL_FILE, Contact, is_gone, is_here, listed_jobs, read_contact

Running = tuple[Path, Contact]
"""A job's directory, and how to ask its launcher."""

_NOT_RUNNING = {
    State.KILLED: "the launcher of this job was killed, and its agents have ended the ranks",
    State.ENDED: "this job has ended",
}


def runs() -> Path:
    """Where jobs that are run here have their directories: ``output.log_dir``.  Raises ConfigError."""
    from cpulaunch.config.load import load

    return Path(load()["output.log_dir"])


def running_jobs(directories: Sequence[Path] = ()) -> list[Running]:
    """The user's jobs here, and those in ``directories``, of jobs or of one; the newest first.

    Raises UsageError.
    """
    for directory in directories:
        if not os.path.isdir(directory):
            hint = "name a job's directory, such as runs/20261122-214433-…, or one above it"
            raise UsageError(f"{directory}: no such directory", hint=hint)
    found: dict[str, Running] = {}
    named = (place for directory in directories for place in _places(directory))
    for place in (*listed_jobs(os.environ), *named):
        if contact := read_contact(place):
            found.setdefault(contact.job, (place, contact))
    return sorted(found.values(), key=lambda running: running[1].started, reverse=True)


def find_job(named: str | None) -> Running:
    """The job that the user has named, by its id, its beginning or a directory; else the newest one here.

    Raises UsageError.
    """
    if named is None:
        jobs = [running for running in running_jobs() if not is_gone(running[1])]
        for running in jobs:
            if is_here(running[1]):
                return running
        hint = "`cpulaunch stacks DIR` asks a job by its directory, such as runs/20261122-214433-…"
        for _, elsewhere in jobs:
            hint = f"`cpulaunch stacks {elsewhere.job}` asks the one on {elsewhere.host}"
            break
        raise UsageError("no job of yours is running on this host", hint=hint)
    if os.path.isdir(directory := Path(named)):
        for place in _places(directory):
            if (contact := read_contact(place)) and not is_gone(contact):
                return place, contact
        why = f"{named}: {_NOT_RUNNING.get(state_of(directory), 'no job is running there')}"
        raise UsageError(why, hint=f"a running job's directory has a file {CONTROL_FILE} of yours")
    found = [running for running in running_jobs() if running[1].job.startswith(named)]
    if len(found) == 1:
        return found[0]
    hint = "`cpulaunch jobs` lists those that are running"
    raise UsageError(f"{named}: {'several jobs match' if found else 'no such running job'}", hint=hint)


def find_directory(named: str | None) -> Path:
    """The directory of a job that runs or has ended: named as for `find_job`; else the newest one.

    Raises UsageError.
    """
    if named is not None and os.path.isdir(named):
        for place in jobs_below(Path(named)):
            return place
        raise UsageError(f"{named}: no job has been run there", hint="a job's directory has a file plan.json")
    # A job that runs here is both in the list and below that directory.
    known = {os.path.realpath(place): place for place in (*listed_jobs(os.environ), *jobs_below(runs()))}
    found = [place for place in known.values() if named is None or place.name.startswith(named)]
    if found and (named is None or len(found) == 1):
        return max(found, key=lambda place: place.name)
    hint = "`cpulaunch jobs` lists them; the directory of a job will do, too"
    if named is None:
        raise UsageError(f"no job is running, and none has been run in {runs()}/", hint=hint)
    raise UsageError(f"{named}: {'several jobs match' if found else 'no such job'}", hint=hint)


def _places(directory: Path) -> Iterator[Path]:
    """A job's directory, or those in a directory of jobs, the newest first."""
    yield directory
    try:
        yield from sorted((path.parent for path in directory.glob(f"*/{CONTROL_FILE}")), reverse=True)
    except OSError:
        pass


def printable(text: str) -> str:
    """A text of a job without what would steer a terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)
