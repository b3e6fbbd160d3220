"""Which of several failures came first: by time, and by cause.  Pure.

Errors of other libraries say only by their text that a peer is gone.  As a program may use sockets for much
else, such as an upload, that counts only if torch has raised the error, or if the rank has not completed an
operation of a process group.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

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
    """,
    re.VERBOSE,
)
"""What torch's stores, gloo's pairs, oneCCL and sockets say."""

_TORCHS = re.compile(r"^torch\.distributed\.\w+Error\b|\bgloo/")
"""A class of torch's, or a source file of gloo's."""

_FRAME = re.compile(r'^  File "([^"]*)"', re.MULTILINE)
"""The file of a frame in a traceback."""

SLACK = 1.0
"""Seconds by which an end may be noted later than what follows from it: a process that ends closes its
connections before its parent knows, and clocks of hosts differ."""


class Candidate(NamedTuple):
    """A failure that the launcher hasn't asked for.  ``at`` is in seconds, on the launcher's clock.

    ``by_signal``: somebody else has, such as mpiexec, which ends all ranks when one has died.
    """

    at: float
    kind: str
    exit_code: int
    failure: Failure
    by_signal: bool = False


def cause_of(raised: Raised) -> Cause:
    """Why a program has raised an exception: as it says itself, or by the text of another library's error."""
    if said := Cause.from_document(raised.cause):
        return said
    return Cause(Kind.PEER_GONE if _peer_is_gone(raised) else Kind.EXCEPTION)


def _peer_is_gone(raised: Raised) -> bool:
    """Whether an exception is about a peer that is gone, or has not answered."""
    if not _PEER_IS_GONE.search(raised.error):
        return False
    return bool(_TORCHS.search(raised.error)) or _raised_by_torch(raised.traceback) or _is_unfinished(raised)


def _raised_by_torch(traceback: str) -> bool:
    """Whether the innermost frame is of torch, which has called its C++ there."""
    files = _FRAME.findall(traceback)
    return bool(files) and "/torch/" in files[-1]


def _is_unfinished(raised: Raised) -> bool:
    operations = (operation for group in raised.groups for operation in group["operations"])
    return any(operation["state"] != COMPLETED for operation in operations)


def root_cause(
    candidates: Collection[Candidate],
    succeeded: Collection[tuple[float, int]],
    *,
    independent: bool = False,
) -> Candidate | None:
    """The earliest failure that isn't another's consequence; where all are, the earliest.

    One that says what another rank has found comes after that one's.

    ``succeeded`` are (time, rank) of those that ended with exit code 0: where all failures are consequences,
    they may be so of an early end, and these are the cause's ``ranks``.  ``independent``: no failure is
    another's consequence.
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
    first = ordered[0]
    before = [(at, rank) for at, rank in sorted(succeeded) if at < first.at + SLACK]
    if not before:
        return first
    at = before[0][0]
    left = tuple(rank for _, rank in before)
    when = f"{first.at - at:.1f} s earlier" if first.at - at >= 0.05 else "just before"
    note = f"{RANKS.several(left)} had exited with code 0, {when}"
    return first._replace(failure=replace(first.failure, note=note, ranks=left))
