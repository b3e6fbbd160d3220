"""Find the root cause among several failures, by time and by kind.  Pure.

For other libraries, only the error's text shows that a peer is gone.  A program may also use sockets for
other purposes, such as an upload.  So the text counts only if torch raised the error, or if the rank has an
uncompleted operation of a process group.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from cpulaunch.cause import Cause, Kind
from cpulaunch.ledger import COMPLETED
from cpulaunch.messages import Failure as Raised
from cpulaunch.model.names import RANKS
from cpulaunch.supervise.job.outcome import Failure

_PEER_IS_GONE = re.compile(
    r"""
    ^(\w+\.)*(Connection(Reset|Aborted|Refused)Error|BrokenPipeError|Dist(Backend|Network|Store)Error)\b
    | (closed|reset|refused|aborted)\ by\ peer | Broken\ pipe | Connection\ (closed|reset|refused)
    | [Tt]imed\ out\ waiting | Socket\ Timeout
    | successfully\ reached\ monitoredBarrier,\ but\ received\ errors
    """,
    re.VERBOSE,
)
"""Errors of torch's stores, gloo, oneCCL and sockets that say that a peer is gone."""

_TORCHS = re.compile(r"^torch\.distributed\.\w+Error\b|\bgloo/")
"""An exception class of torch, or a source file of gloo."""

_GLOO_TIMED_OUT = re.compile(
    r"\bgloo/.*\bTimed out waiting (\d+)ms for |\bfailed to pass monitoredBarrier in (\d+) ms"
)
"""gloo's error about an operation's timeout, in milliseconds."""

_FRAME = re.compile(r'^  File "([^"]*)"', re.MULTILINE)
"""The file of a frame in a traceback."""

SLACK = 1.0
"""Maximum seconds by which a failure may be recorded later than its consequences.

A process closes its connections before its parent notices its end, and the clocks of hosts differ.
"""


class Candidate(NamedTuple):
    """A failure that the launcher did not request.  ``at`` is in seconds, on the launcher's clock.

    ``by_signal``: another process ended the rank.  For example, mpiexec ends all ranks when one has died.
    """

    at: float
    kind: str
    exit_code: int
    failure: Failure
    by_signal: bool = False


def cause_of(raised: Raised) -> Cause:
    """Return the cause that the program reported.  Without a report, infer it from the error's text."""
    if reported := Cause.from_document(raised.cause):
        return reported
    timeout, operations = _GLOO_TIMED_OUT.search(raised.error), list(_unfinished(raised))
    if timeout and operations:
        last = max(operations, key=lambda each: each["enqueued"])
        seconds = int(timeout[1] or timeout[2]) / 1e3
        return Cause(Kind.PEER_LATE, operation=last["kind"], sequence=last["sequence"], timeout=seconds)
    return Cause(Kind.PEER_GONE if _peer_is_gone(raised) else Kind.EXCEPTION)


def _peer_is_gone(raised: Raised) -> bool:
    """Whether an exception says that a peer is gone, or has not answered."""
    if not _PEER_IS_GONE.search(raised.error):
        return False
    innermost = _FRAME.findall(raised.traceback)[-1:]
    if _TORCHS.search(raised.error) or any("/torch/" in file for file in innermost):  # torch's C++ raised it
        return True
    return any(_unfinished(raised))


def _unfinished(raised: Raised) -> Iterator[Mapping[str, Any]]:
    for group in raised.groups:
        yield from (operation for operation in group["operations"] if operation["state"] != COMPLETED)


def root_cause(
    candidates: Collection[Candidate], succeeded: Collection[tuple[float, int]], *, independent: bool = False
) -> Candidate | None:
    """Return the first failure that isn't a consequence of another one.

    If all are consequences, return the first failure, or a timeout at about the same time.  A failure that
    a rank only passes on from another rank comes after that rank's own.

    ``succeeded`` has the times and numbers of the ranks that ended with exit code 0.  If all failures are
    consequences, the early end of these ranks may be the cause; they become ``ranks`` of the failure.
    ``independent``: no failure is a consequence of another one.
    """
    ordered = sorted(candidates, key=lambda c: c.at)
    if not ordered:
        return None
    causes = [
        candidate
        for candidate in ordered
        if not candidate.by_signal and (independent or not candidate.failure.cause.is_consequence)
    ]
    if causes:
        own = (each for each in causes if each.failure.cause.finder is None)
        return next(own, causes[0])
    # A rank that timed out was waiting long before its peers closed their connections.
    soon = (each for each in ordered if each.at < ordered[0].at + SLACK)
    first = next((each for each in soon if each.failure.cause.kind is Kind.PEER_LATE), ordered[0])
    before = [(at, rank) for at, rank in sorted(succeeded) if at < first.at + SLACK]
    if not before:
        return first
    at = before[0][0]
    left = tuple(rank for _, rank in before)
    when = f"{first.at - at:.1f} s earlier" if first.at - at >= 0.05 else "just before"
    note = f"{RANKS.several(left)} had exited with code 0, {when}"
    return first._replace(failure=replace(first.failure, note=note, ranks=left))
