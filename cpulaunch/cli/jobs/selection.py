"""Finds the job that a user names, among running jobs and in directories of jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from cpulaunch.config.config import Config
from cpulaunch.errors import ConfigError, HostError, UsageError
from cpulaunch.model.cores import CoreSet
from cpulaunch.supervise.control.client import Observer
from cpulaunch.supervise.control.registry import (
    CONTROL_FILE,
    Contact,
    is_gone,
    is_here,
    listed_jobs,
    read_contact,
)
from cpulaunch.supervise.output.directory import TEMPORARY, temporary_places
from cpulaunch.supervise.output.record import (
    PLAN,
    State,
    age,
    documents,
    jobs_below,
    read_document,
    state_of,
)

Running = tuple[Path, Contact]
"""A job's directory, and the contact of its launcher."""

WHICH = """\
JOB is a job's id or the beginning of one, a job's directory, or a directory of jobs.  Default: your newest
job in the log directory (output.log_dir, usually runs/), or else your newest running job on this host."""
"""Help text of commands about one job."""

NEWEST = "the job; default: your newest job"

ONLY = "the job; default: your only running job"
"""Help text of commands that slow down a job.  If several jobs are running, the user has to name one."""

ONLY_WHICH = """\
JOB is a job's id or the beginning of one, a job's directory, or a directory of jobs.  Default: your only
running job in the log directory (output.log_dir, usually runs/)."""

_NOT_RUNNING = {
    State.KILLED: "the launcher of this job was killed, and its agents have ended the ranks",
    State.ENDED: "this job has ended",
}

MAX_NAMED = 5
"""Maximum number of jobs that a message names."""


def runs() -> Path:
    """Return ``output.log_dir``, the directory of the jobs' directories.  Raises ConfigError."""
    from cpulaunch.config.load import load

    return Path(load().output.log_dir)


def usual_places() -> list[Path]:
    """Return the directories to search for jobs: ``runs()``, and the jobs that could not write to it.

    Within ``runs()`` or a job's directory, return this directory or its parent.  Raises ConfigError.
    """
    usual = runs()
    if places := [place for place in with_displaced(usual) if place.is_dir()]:
        return places
    here = Path.cwd()
    return [place for place in (here, here.parent) if place.name == usual.name and jobs_below(place)] or [
        place for place in (here,) if jobs_below(place)
    ]


def displaced_jobs(log_dir: Path) -> list[Path]:
    """Return the user's jobs in temporary directories, which could not write to ``log_dir``."""
    made = (job for place in temporary_places() for job in place.glob(f"{TEMPORARY}*/*") if _is_ours(job))
    return [job for job in made if _planned_log_dir(job) == log_dir.absolute()]


def with_displaced(directory: Path) -> list[Path]:
    """Return ``directory``, if it exists or has no displaced jobs, and its displaced jobs."""
    displaced = displaced_jobs(directory)
    return [*([] if displaced and not directory.is_dir() else [directory]), *displaced]


def _planned_log_dir(job: Path) -> Path | None:
    """Return the ``output.log_dir`` of a job's plan, relative to the ranks' working directory."""
    plan = read_document(job / PLAN) or {}
    for setting in documents(plan.get("settings")):
        if setting.get("key") == Config.output.log_dir.key:
            return Path(str(plan.get("directory")), str(setting.get("value")))
    return None


def running_jobs(directories: Sequence[Path] = ()) -> list[Running]:
    """Return the user's running jobs on this host and the jobs in ``directories``, the newest first.

    Raises UsageError if a directory doesn't exist.
    """
    for directory in directories:
        if not os.path.isdir(directory):
            hint = "name a job's directory, such as runs/20261122-214433-…, or its parent"
            raise UsageError(f"{directory}: no such directory", hint=hint)
    found: dict[str, Running] = {}
    named = (place for directory in directories for place in _places(directory))
    for place in (*listed_jobs(os.environ), *named):
        if contact := read_contact(place):
            found.setdefault(contact.job, (place, contact))
    return sorted(found.values(), key=lambda running: running[1].started, reverse=True)


def find_job(named: str | None) -> Running:
    """Find a running job by its id, the start of its id, or a directory.  Raises UsageError.

    Without a name, return the newest job, in this order: jobs in ``usual_places()`` on this host, jobs there
    that can be contacted, other jobs on this host.
    """
    if named is None:
        return _newest(usual_places())
    if os.path.isdir(directory := Path(named)):
        for place in _places(directory):
            if (contact := read_contact(place)) and not is_gone(contact):
                return place, contact
        raise _not_running(named, directory)
    found = [running for running in running_jobs() if running[1].job.startswith(named)]
    if len(found) == 1:
        return found[0]
    if found:
        raise _several(named, [contact.job for _, contact in found])
    for place in _ended(named):
        raise _not_running(named, place)
    raise UsageError(f"{named}: no such running job", hint="`cpulaunch jobs` lists running jobs")


def only_job() -> Running:
    """Return the only job in ``usual_places()`` that runs and can be contacted.  Raises UsageError."""
    places = usual_places()
    running = [each for each in running_jobs(places) if not is_gone(each[1])]
    ours = [each for each in running if _is_of(each[0], places)]
    asked = [(place, contact) for place, contact in ours if is_here(contact) or _answers(contact)]
    if len(asked) == 1:
        return asked[0]
    jobs = [contact.job for _, contact in asked or running]
    if asked:
        raise UsageError(f"several jobs of yours are running here: {_id_list(jobs)}", hint="name one of them")
    hint = (
        f"name one of your other running jobs: {_id_list(jobs)}"
        if jobs
        else "`cpulaunch jobs` lists your jobs"
    )
    raise UsageError(f"no job of yours is running in {runs()}/", hint=hint)


def _newest(places: Sequence[Path]) -> Running:
    """Return the newest job, with preference for jobs in ``places``, and then for jobs on this host."""
    jobs = [running for running in running_jobs(places) if not is_gone(running[1])]
    jobs.sort(key=lambda running: (not _is_of(running[0], places), not is_here(running[1])))
    for directory, contact in jobs:
        if is_here(contact) or (_is_of(directory, places) and _answers(contact)):
            return directory, contact
    hint = "name a job's directory, such as runs/20261122-214433-…"
    for _, elsewhere in jobs[:1]:
        hint = f"`cpulaunch stacks {elsewhere.job}` asks the job on {elsewhere.host}"
    raise UsageError("no job of yours is running on this host", hint=hint)


def _answers(contact: Contact) -> bool:
    """Return whether a launcher on another host can be contacted from here."""
    try:
        with Observer(contact):
            return True
    except HostError:
        return False


def _not_running(named: str, directory: Path) -> UsageError:
    why = _NOT_RUNNING.get(state_of(directory))
    if why is None:
        hint = f"the directory of your running job contains {CONTROL_FILE}"
        if jobs_below(directory):
            hint = f"`cpulaunch jobs {directory}` lists jobs that have ended"
        return UsageError(f"{named}: no job is running there", hint=hint)
    hint = f"`cpulaunch logs {named}` shows its output, and `cpulaunch report {named}` writes a report"
    if kept := sorted(directory.glob("stacks-*.txt")):
        hint = f"{kept[-1]} has the stacks of the last stall; {hint}"
    return UsageError(f"{named}: {why}", hint=hint)


def _several(named: str, jobs: Sequence[str]) -> UsageError:
    return UsageError(
        f"{named}: several jobs match: {_id_list(jobs)}", hint="type more of the id, or name the directory"
    )


def _id_list(jobs: Sequence[str]) -> str:
    return ", ".join(jobs[:MAX_NAMED]) + (", …" if len(jobs) > MAX_NAMED else "")


def _ended(named: str) -> list[Path]:
    """Return the jobs in the usual places whose ids begin with ``named``."""
    return [place for where in usual_places() for place in jobs_below(where) if place.name.startswith(named)]


def find_directory(named: str | None) -> Path:
    """Find the directory of a running or ended job by its id, the start of its id, or a directory.

    Without a name, return the user's newest job in ``usual_places()``, or else the newest running job on this
    host.  Raises UsageError.
    """
    if named is not None and os.path.isdir(named):
        for place in jobs_below(Path(named)):
            return place
        raise UsageError(f"{named}: contains no job", hint="a job's directory contains plan.json")
    # A running job is both in the list and in the log directory.
    places = usual_places()
    below = [job for where in places for job in jobs_below(where)]
    known = {os.path.realpath(place): place for place in (*listed_jobs(os.environ), *below)}
    if named is None:
        ours = [place for place in known.values() if _is_ours(place)]
        if found := [place for place in ours if _is_of(place, places)] or ours:
            return max(found, key=age)
    elif found := [place for place in known.values() if place.name.startswith(named)]:
        if len(found) == 1:
            return found[0]
        raise _several(named, sorted(place.name for place in found))
    hint = "`cpulaunch jobs` lists jobs; you may also name a job's directory"
    if named is None:
        raise UsageError(f"no running job of yours, and no job in {runs()}/", hint=hint)
    raise UsageError(f"{named}: no such job", hint=hint)


def _is_of(job: Path, places: Sequence[Path]) -> bool:
    """Return whether a job's directory is one of ``places``, or directly in one."""
    place = os.path.realpath(job)
    return bool({place, os.path.dirname(place)} & {os.path.realpath(each) for each in places})


def _is_ours(job: Path) -> bool:
    """Return whether a job belongs to the user; several users may share a directory."""
    try:
        return job.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _places(directory: Path) -> Iterator[Path]:
    """Yield the directory itself, and the running jobs in it, the newest first."""
    yield directory
    with suppress(OSError):
        yield from sorted((path.parent for path in directory.glob(f"*/{CONTROL_FILE}")), reverse=True)


def parse_ranks(option: str, text: str | None) -> CoreSet | None:
    """Return the ranks in the value of ``option``; None if the option is not set.  Raises UsageError."""
    if text is None:
        return None
    with suppress(ConfigError):
        if ranks := CoreSet.parse(text):
            return ranks
    raise UsageError(f"{option} {text[:40]}: expected ranks, such as 3 or 0,4-7")


def printable(text: str) -> str:
    """Replace control characters in a job's text, which could control the terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)
