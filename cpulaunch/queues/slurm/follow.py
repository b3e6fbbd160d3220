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

LOOK = 2.0
"""Seconds between two requests for the job's state, as Slurm's controller serves a whole cluster."""

READ = 0.2
"""Seconds between two reads of the log."""

CHUNK = 1 << 16

ENDED = {
    "COMPLETED": 0, "FAILED": 1, "CANCELLED": 143, "TIMEOUT": 143, "PREEMPTED": 143, "DEADLINE": 143,
    "NODE_FAIL": NODE_LOST_EXIT_CODE, "OUT_OF_MEMORY": 137, "BOOT_FAIL": 1, "REVOKED": 1,
}  # fmt: skip
"""Final state → the exit code of a job that has none of its own.

A requeued job is never in one of these states: it is COMPLETING, then PENDING.
"""

NO_SIGNAL = 65
"""From this number on, Slurm's "signals" are its own codes, such as 125 for memory that ran out."""

UNKNOWN = "Invalid job id"
"""The message of scontrol for a job that ended some minutes ago (`MinJobAge`)."""

_WORD = r"(?<!\S){}=(\S*)"
_REST_OF_LINE = r"(?m)^ *{}=(.*)$"


class JobInfo(NamedTuple):
    """A job's state in Slurm.

    ``code`` and ``signal`` are those with which it ended.  ``requeued`` is how often it was requeued.
    ``output`` and ``errors`` are the paths of its logs.
    """

    state: str
    reason: str
    nodes: str
    requeued: int
    code: int
    signal: int
    output: Path
    errors: Path

    @property
    def exit_code(self) -> int:
        """The job's exit code, or 128 + its signal; if Slurm has ended it, the code of its state in ENDED."""
        if self.signal in range(1, NO_SIGNAL):
            return 128 + self.signal
        return self.code or ENDED.get(self.state, 1)


def logs_before(options: Mapping[str, str]) -> dict[Path, os.stat_result]:
    """The existing files that sbatch's ``options`` name as the job's logs, mostly logs of an earlier job.

    Call this in the job's working directory.  A name with a pattern, such as %j, is taken to be new.
    """
    paths = [Path.cwd() / options[name] for name in ("--output", "--error") if options.get(name)]
    return {path: path.stat() for path in paths if path.is_file()}


def follow(job: str, before: Mapping[Path, os.stat_result], tell: Tell, *, appends: bool) -> int:
    """Show the job's output and state until it has ended, and return its exit code.

    ``before`` are its log files as they were before the job.  ``appends`` says whether it appends to them or
    truncates them.  Raises HostError if Slurm doesn't know the job, or not any more.
    """
    info, said = described(job), ""
    logs = [_Log(info.output, sys.stdout.buffer, before.get(info.output), appends=appends)]
    if info.errors != info.output:
        logs.append(_Log(info.errors, sys.stderr.buffer, before.get(info.errors), appends=appends))
    while True:
        _show(logs)
        if (line := _in_words(job, info)) != said:
            tell(line)
            said = line
        if info.state in ENDED:
            return info.exit_code
        due = time.monotonic() + LOOK
        while time.monotonic() < due:
            time.sleep(READ)
            _show(logs)
        info = _look_again(job, info, tell)


def _look_again(job: str, last: JobInfo, tell: Tell) -> JobInfo:
    """The job's state, or ``last``, with a warning, if Slurm's controller doesn't answer."""
    try:
        return described(job)
    except HostError as e:
        if UNKNOWN in str(e):
            raise
        tell(f"warning: {e}")
        return last


def described(job: str) -> JobInfo:
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
    """A sentence on how to watch the job.  ``array``: sbatch's options if the job is an array, else None."""
    if array is not None:
        output = log_of_array(job, array)
    else:
        output = f"slurm-{job}.out"
        with contextlib.suppress(HostError):
            output = shlex.quote(shown_path(described(job).output))
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


def _in_words(job: str, info: JobInfo) -> str:
    again = f" (queued anew {info.requeued}×)" if info.requeued else ""
    if info.state == "PENDING":
        why = f": {info.reason}" if info.reason not in ("", "None") else ""
        return f"Slurm job {job} waits{again}{why}"
    if info.state == "RUNNING":
        return f"Slurm job {job} runs on {info.nodes}{again}"
    if info.state in ENDED:
        return f"Slurm job {job} has ended{again}: {info.state}, exit code {info.exit_code}"
    return f"Slurm job {job}: {info.state}"


class _Log:
    """A log file that another host writes.  ``old`` is its status before the job; old content isn't shown."""

    def __init__(self, path: Path, to: BinaryIO, old: os.stat_result | None, *, appends: bool) -> None:
        self._path, self._to, self._old = path, to, old
        self._shown = old.st_size if old and appends else 0

    def show(self) -> None:
        """Show the new content.

        Open the file anew each time, as NFS asks the server for changes only then.
        """
        try:
            with self._path.open("rb") as file:
                if self._old and _alike(os.fstat(file.fileno()), self._old):
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


def _alike(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_size, one.st_mtime_ns, one.st_ino) == (other.st_size, other.st_mtime_ns, other.st_ino)
