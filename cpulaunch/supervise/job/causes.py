"""Which of several failures came first: by time, and by kind."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from cpulaunch.model.names import RANKS
from cpulaunch.supervise.job.outcome import Failure

_PEER_HAS_GONE = re.compile(
    r"""
    ^(\w+\.)*(Connection(Reset|Aborted|Refused)Error|BrokenPipeError|Dist(Backend|Network|Store)Error)\b
    | (closed|reset|refused|aborted)\ by\ peer | Broken\ pipe | Connection\ (closed|reset|refused)
    | [Tt]imed\ out\ waiting | Socket\ Timeout
    | \brank\ \d+(\ on\ \S+)?\ (has\ ended|is\ lost|has\ left\ the\ group)
    | group's\ store\ cannot\ be\ reached | a\ rank\ did\ not\ call\ it
    """,
    re.VERBOSE,
)
"""What a rank says when another has left: torch's stores, gloo's pairs, our ccl group, plain sockets."""

_CALLS_OTHER = re.compile(r"\brank \d+(?: on \S+)? calls |\bis ahead: it calls ")
"""What our ccl group says of ranks that call different operations."""

_HEARD = re.compile(r"\bcannot complete: rank \d+(?: on \S+)? failed: ")
"""What our ccl group says of what another rank has found."""

_SIZES_DIFFER = re.compile(
    r"\brank (\d+): .*? failed: .*?\brank (\d+)(?: on \S+)? sends \d+ bytes? to this rank, "
)
"""What it says of a rank that was sent more than it expects, or less, by another one."""

_HOST_IS_SILENT = re.compile(r"\bhost .* has given no sign of life for ")
"""What our ccl group says of a host that it has lost."""

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


def says_host_is_lost(error: str) -> bool:
    """Whether an exception says that a host has fallen silent."""
    return bool(_HOST_IS_SILENT.search(error))


def says_ranks_differ(error: str) -> bool:
    """Whether an exception says that ranks call different operations, or with different sizes."""
    return bool(_CALLS_OTHER.search(error) or _SIZES_DIFFER.search(error))


def of_other_sizes(error: str) -> tuple[int, ...]:
    """The two ranks of which an exception says that one sends another size than the other expects."""
    found = _SIZES_DIFFER.search(error)
    return (int(found[1]), int(found[2])) if found else ()


def is_consequence(error: str | None) -> bool:
    """Whether an exception says no more than that somebody else has gone."""
    return bool(error and _PEER_HAS_GONE.search(error) and not says_ranks_differ(error))


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
        if not candidate.by_signal and (independent or not is_consequence(candidate.failure.error))
    ]
    if causes:
        own = (each for each in causes if not _HEARD.search(each.failure.error or ""))
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
