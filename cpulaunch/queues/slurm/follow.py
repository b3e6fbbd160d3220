"""Follow the output and state of a Slurm job until it has ended."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cpulaunch.errors import NODE_LOST_EXIT_CODE, HostError
from cpulaunch.queues.base import Tell
from cpulaunch.queues.slurm.nodes import ask_slurm
from cpulaunch.wording import shown_path

POLL_INTERVAL = 2.0
"""Seconds between two requests for the job's state."""

READ_INTERVAL = 0.2
"""Seconds between two reads of the log."""

CHUNK = 1 << 16

ENDED = {
    "COMPLETED": 0, "FAILED": 1, "CANCELLED": 143, "TIMEOUT": 143, "PREEMPTED": 143, "DEADLINE": 143,
    "NODE_FAIL": NODE_LOST_EXIT_CODE, "OUT_OF_MEMORY": 137, "BOOT_FAIL": 1, "REVOKED": 1,
}  # fmt: skip
"""Final state → the exit code of a job that has no exit code.

A job that is requeued is never in one of these states: it is COMPLETING, then PENDING.
"""

NO_SIGNAL = 65
"""From this number on, Slurm's "signals" are its own codes, such as 125 for out of memory."""

UNKNOWN = "Invalid job id"
"""scontrol's message about a job that ended some minutes ago (`MinJobAge`)."""

_WORD = r"(?<!\S){}=(\S*)"
_REST_OF_LINE = r"(?m)^ *{}=(.*)$"


class JobInfo(NamedTuple):
    """A job's state in Slurm."""

    state: str
    reason: str
    nodes: str
    requeued: int  # how often it was requeued
    code: int  # the exit code, if it has ended
    signal: int  # the signal that ended it, or 0
    output: Path
    errors: Path

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it; if Slurm ended the job, the code for its state in ENDED."""
        if self.signal in range(1, NO_SIGNAL):
            return 128 + self.signal
        return self.code or ENDED.get(self.state, 1)


def logs_before(options: Mapping[str, str]) -> dict[Path, os.stat_result]:
    """The existing log files of the job, mostly from an earlier job.

    Call this in the job's working directory.  Names with a pattern, such as %j, are assumed to be new.
    """
    paths = [Path.cwd() / options[name] for name in ("--output", "--error") if options.get(name)]
    return {path: path.stat() for path in paths if path.is_file()}


def follow(job: str, before: Mapping[Path, os.stat_result], tell: Tell, *, appends: bool) -> int:
    """Show the job's output and state until it has ended, and return its exit code.

    ``before`` is the result of `logs_before`, from before the job.  ``appends`` says whether the job appends
    to these files instead of truncating them.  Raises HostError if Slurm doesn't know the job.
    """
    info, shown = job_state(job), ""
    logs = [_Log(info.output, sys.stdout.buffer, before.get(info.output), appends=appends)]
    if info.errors != info.output:
        logs.append(_Log(info.errors, sys.stderr.buffer, before.get(info.errors), appends=appends))
    while True:
        _show(logs)
        if (line := _sentence(job, info)) != shown:
            tell(line)
            shown = line
        if info.state in ENDED:
            return info.exit_code
        due = time.monotonic() + POLL_INTERVAL
        while time.monotonic() < due:
            time.sleep(READ_INTERVAL)
            _show(logs)
        info = _poll(job, info, tell)


def _poll(job: str, last: JobInfo, tell: Tell) -> JobInfo:
    """The job's state.  If Slurm's controller doesn't answer, warn and return ``last``."""
    try:
        return job_state(job)
    except HostError as e:
        if UNKNOWN in str(e):
            raise
        tell(f"warning: {e}")
        return last


def job_state(job: str) -> JobInfo:
    """Ask Slurm for the job's state.  Raises HostError."""
    return job_info(ask_slurm(["scontrol", "show", "job", job]))


def job_info(text: str) -> JobInfo:
    """Parse the output of ``scontrol show job``."""

    def found(pattern: str, key: str) -> str:
        match = re.search(pattern.format(key), text)
        return match[1] if match else ""

    code, _, signal = found(_WORD, "ExitCode").partition(":")
    return JobInfo(
        state=found(_WORD, "JobState"),
        reason=found(_WORD, "Reason"),
        nodes=found(_WORD, "NodeList").replace("(null)", ""),
        requeued=int(found(_WORD, "Restarts") or 0),
        code=int(code or 0),
        signal=int(signal or 0),
        output=Path(found(_REST_OF_LINE, "StdOut")),
        errors=Path(found(_REST_OF_LINE, "StdErr")),
    )


def how_to_watch(job: str, array: Mapping[str, str] | None) -> str:
    """A sentence on how to watch the job.  ``array`` are sbatch's options if it is an array, else None."""
    if array is not None:
        output = log_of_array(job, array)
    else:
        output = f"slurm-{job}.out"
        with contextlib.suppress(HostError):
            output = shlex.quote(shown_path(job_state(job).output))
    return (
        f"`tail -F {output}` shows what it prints, `squeue -j {job}` its state, and `scancel {job}` ends it"
    )


def log_of_array(job: str, options: Mapping[str, str]) -> str:
    """A shell pattern for the logs of all jobs of an array (sbatch(1), "filename pattern")."""
    known = {"%A": job, "%x": options.get("--job-name", ""), "%%": "%"}
    path = Path(options.get("--chdir", "")) / options.get("--output", "slurm-%A_%a.out")
    pieces = re.split(r"(%%|%\d*[a-zA-Z])", str(path))
    for number, piece in enumerate(pieces):
        if number % 2 and piece not in known:
            pieces[number] = "*"
        elif text := known.get(piece, piece) if number % 2 else piece:
            pieces[number] = shlex.quote(text)
    return "".join(pieces)


def _sentence(job: str, info: JobInfo) -> str:
    requeued = f" (requeued {info.requeued}×)" if info.requeued else ""
    if info.state == "PENDING":
        why = f": {info.reason}" if info.reason not in ("", "None") else ""
        return f"Slurm job {job} waits{requeued}{why}"
    if info.state == "RUNNING":
        return f"Slurm job {job} runs on {info.nodes}{requeued}"
    if info.state in ENDED:
        return f"Slurm job {job} has ended{requeued}: {info.state}, exit code {info.exit_code}"
    return f"Slurm job {job}: {info.state}"


class _Log:
    """A log file that another host writes.  Its content from before the job (status ``old``) is skipped."""

    def __init__(self, path: Path, to: BinaryIO, old: os.stat_result | None, *, appends: bool) -> None:
        self._path, self._to, self._old = path, to, old
        self._shown = old.st_size if old and appends else 0

    def show(self) -> None:
        """Show the new content.

        Open the file each time, because NFS asks the server for changes only then.
        """
        try:
            with self._path.open("rb") as file:
                if self._old and _is_same_file(os.fstat(file.fileno()), self._old):
                    return
                self._old = None
                if file.seek(0, os.SEEK_END) < self._shown:
                    self._shown = 0  # a requeued job has truncated it
                file.seek(self._shown)
                while data := file.read(CHUNK):
                    self._shown += len(data)
                    self._to.write(data)
        except FileNotFoundError:
            return
        self._to.flush()


def _show(logs: Iterable[_Log]) -> None:
    for log in logs:
        log.show()


def _is_same_file(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_size, one.st_mtime_ns, one.st_ino) == (other.st_size, other.st_mtime_ns, other.st_ino)
