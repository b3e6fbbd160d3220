"""Failure report of a job for the terminal: the first failure in a box, then a line about the other ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

from cpulaunch.errors import SAVED_EXIT_CODE
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.names import INSTANCE, RANKS, Names
from cpulaunch.supervise.job import outcome as kinds
from cpulaunch.supervise.job.outcome import Failure, Outcome, signal_name
from cpulaunch.supervise.output.box import box
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.output.lines import SEPARATOR
from cpulaunch.wording import counted, shown_path

MEANING = {
    4: "illegal instruction: built for another CPU?",
    6: "aborted: a library gave up",
    7: "bus error: /dev/shm full?",
    8: "arithmetic error",
    9: "killed",
    11: "invalid memory access",
    15: "ended by another program or the batch system",
}
TITLES = {kinds.NODE_LOST: "host {0.host} was lost", kinds.START_FAILED: "{1} on {0.host} was not started"}
NOT_AS_PLANNED = "{1} on {0.host} was started, but not as planned"
"""Title if a rank was started, and its placement then turned out to differ from the plan."""

FATAL = "Fatal Python error: "
"""First words of faulthandler's report."""

THROWN = re.compile(r"terminate called after throwing an instance of '(.*)'\n  what\(\):  ((?:.|\n)*)\Z")
"""What the C++ runtime prints about an exception that was not caught; faulthandler's report follows."""

OWN_THREAD = re.compile(
    r'Thread 0x.*\n(?:  File .*\n)*  File ".*/cpulaunch/(?:runtime|ccl)/.*\n'
    r'(?:  File ".*/threading\.py", .*\n)+\n?'
)
"""The stack of a thread that cpulaunch has started, in faulthandler's report."""

BEFORE_ABORT = re.compile(
    r'(Current thread 0x.*\n)(?:  File ".*/cpulaunch/runtime/observe/abort\.py", .*\n)+(\n)?'
)
"""Frames of cpulaunch's hook that runs before C++ aborts the process."""

WRAPPER = re.compile(r'  File ".*/cpulaunch/runtime/observe/(?:communication|ledger|mirror)\.py", .*\n')
"""A frame of cpulaunch's wrapper around a function of torch that the program has called."""

OURS = "cpulaunch/agent/"
"""Directory of cpulaunch's frames that run the user's program."""

MAX_LINES = 40
"""Maximum lines of a traceback in the box; the log has all of them."""

LAST_LINES = 8
"""Log lines shown for a rank that failed without an exception."""

TAIL = 64 << 10
"""Bytes at the end of a log that are searched for the last lines."""


def failure_report(
    outcome: Outcome,
    directory: JobDirectory | None,
    last_output: Callable[[int], bytes],
    names: Names = RANKS,
) -> str:
    """Return the text to show for a failed or interrupted job.

    ``directory`` has the job's logs, or is None if they cannot be read.  ``last_output`` returns the last
    bytes that a rank has printed.  ``names`` has the words for ranks.
    """
    failure = outcome.first_failure
    if failure and outcome.kind == kinds.STALLED:  # a box about the stall was shown already
        return _stalled(failure, outcome, names)
    if failure is None or failure.rank is None:
        if outcome.kind == kinds.INTERRUPTED:
            saved = "; state saved; rerun the same command to resume"
            early = "; it had made no step, so nothing is lost if it is started again"
            more = (saved if outcome.began else early) if outcome.exit_code == SAVED_EXIT_CODE else ""
            return f"cpulaunch: interrupted after {outcome.seconds:.1f} s{more}\n"
        return f"cpulaunch: the job ended with exit code {outcome.exit_code}\n"
    name = names.one(failure.rank)
    title, head = _title(outcome, failure, name), []
    others = "; ".join(_others(outcome, failure.rank, names))
    last_bytes = last_output(failure.rank)
    log = names.log(failure.rank)
    if failure.disagree:
        title = f"{failure.text}, and {title}"
    elif failure.text:  # other ranks caused the failure
        title, head = failure.text, (failure.note or "").splitlines()
        head += ["", f"{name} on {failure.host} failed then:"]
        failure = replace(failure, note=None)
    story = _story(failure, directory, log, last_bytes, silent=outcome.restarts > 0 and not last_bytes)
    return box(title, [*head, *story]) + (f"cpulaunch: {others}\n" if others else "")


def _title(outcome: Outcome, failure: Failure, name: str) -> str:
    has_run = any(rank.pid is not None for rank in outcome.ranks if rank.rank == failure.rank)
    title = TITLES.get(outcome.kind, "{1} on {0.host} failed first")
    if outcome.kind == kinds.START_FAILED and has_run:
        title = NOT_AS_PLANNED
    return title.format(failure, name)


def _stalled(failure: Failure, outcome: Outcome, names: Names) -> str:
    if names.noun != INSTANCE or failure.rank is None:
        return f"cpulaunch: the job was ended: {failure.error}\n"
    others = "; ".join(_others(outcome, failure.rank, names))
    who = f"{names.one(failure.rank)} on {failure.host}"
    line = f"cpulaunch: {who} was ended: {failure.error_after(who)}\n"
    return line + (f"cpulaunch: {others}\n" if others else "")


def _story(
    failure: Failure, directory: JobDirectory | None, log: str, last_bytes: bytes, *, silent: bool
) -> Iterator[str]:
    """Yield the lines of the box.

    ``silent``: the rank printed nothing in this attempt, so its log is from earlier attempts.
    """
    logged = None if directory is None else _tail(directory, log)
    # If the disk was full or did not respond, the end of the log is missing.
    output = logged if logged and logged.endswith(last_bytes) and not silent else last_bytes
    _, earlier, words_of_this = output.rpartition(SEPARATOR)
    words = (words_of_this.partition(b"\n")[2] if earlier else words_of_this).decode(errors="replace")
    if failure.signal is not None:
        meaning = MEANING.get(failure.signal)
        yield signal_name(failure.signal) + (f" ({meaning})" if meaning else "")
    elif failure.error is None:
        yield f"exit code {failure.exit_code}"
    if failure.error:
        yield failure.error
    if failure.file:
        yield f"at {failure.file}:{failure.line}"
    if failure.note:
        yield from failure.note.splitlines()
    if failure.advice:
        yield from failure.advice.splitlines()
    if failure.traceback:
        lines = failure.traceback.rstrip().splitlines()
        if lines[-1] == failure.error:  # the error is already the first line of the box
            del lines[-1]
        if lines:
            yield ""
        yield from _shortened(lines)
    elif (failure.error is None or failure.signal is not None) and (last := _last_output(words)):
        yield from ("",) if any(line.startswith(FATAL) for line in last) else ("", "Its last output:")
        yield from _shortened(last)
    if directory is not None and logged is not None:
        yield ""
        code = f"exit code {failure.exit_code} · " if failure.error and failure.exit_code is not None else ""
        yield f"{code}log: {shown_path(directory.path / log)}"


def _tail(directory: JobDirectory, log: str) -> bytes | None:
    """Return the last ``TAIL`` bytes of a rank's log; None if it cannot be read."""
    try:
        with open(directory.open(log, os.O_RDONLY | os.O_NONBLOCK), "rb") as f:
            f.seek(max(0, f.seek(0, 2) - TAIL))
            return f.read()
    except OSError:
        return None


def _last_output(text: str) -> list[str]:
    """Return faulthandler's report of a crash if there is one, else the last ``LAST_LINES`` lines."""
    before, fatal, after = text.rpartition(FATAL)
    if fatal:
        report = OWN_THREAD.sub("", (fatal + after).partition("\n\nExtension modules: ")[0])
        report = BEFORE_ABORT.sub(lambda found: "" if found[2] else found[1], report)
        lines = WRAPPER.sub("", report).rstrip().splitlines()
        while len(lines) > 1 and OURS in lines[-1]:
            del lines[-1]
        thrown = THROWN.search(before.rstrip())
        return [*f"{thrown[1]}: {thrown[2]}".splitlines(), "", *lines] if thrown else lines
    return [line.rpartition("\r")[2] for line in text.rstrip().splitlines()[-LAST_LINES:]]


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_LINES:
        return lines
    head = MAX_LINES // 4
    tail = MAX_LINES - head - 1
    return [*lines[:head], f"… {len(lines) - head - tail} lines …", *lines[-tail:]]


def _others(outcome: Outcome, first: int, names: Names) -> Iterator[str]:
    others = sorted((rank for rank in outcome.ranks if rank.rank != first), key=lambda r: r.status)
    for status, group in groupby(others, key=lambda r: r.status):
        numbers = CoreSet(names.number(rank.rank) for rank in group)
        yield f"{counted(len(numbers), f'other {names.noun}')} ({numbers}): {status}"
