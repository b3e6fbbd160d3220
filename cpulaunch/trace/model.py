"""Data of a rank's trace from which figures are computed.  Times are in microseconds of the job's trace."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COLLECTIVE = re.compile(r"(ccl|gloo|mpi|ucc):(\w+)")
"""Matches names of events that are collectives or messages under way, by torch's convention."""

LOADER = "enumerate(DataLoader)#"
OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")


class Span(NamedTuple):
    """An event of a thread."""

    name: str
    thread: int
    begin: float
    end: float


@dataclass
class Collective:
    """One rank's part of a collective.

    ``key`` is backend, group and number, the same in all ranks of the group; None if unknown.  ``place`` is
    the number of the row in which it is drawn.  ``last`` is when the last rank began it, and ``last_rank``
    that rank; both are None if the collective was not matched with other ranks.
    """

    backend: str
    kind: str
    begin: float
    end: float
    args: dict[str, Any]
    key: tuple[str, str, int] | None = None
    place: int = 0
    last: float | None = None
    last_rank: int | None = None


class Note(NamedTuple):
    """A rank's own record of a collective.  ``at`` is when it was called."""

    backend: str
    group: str
    number: int
    kind: str
    at: float


@dataclass
class RankTrace:
    """One rank's trace.

    ``steps`` are numbers of steps and the times of their ends; the first one only marks the start of the
    trace.  ``spans`` are torch's operations, ``input`` and ``optimizer`` are the spans of its DataLoader and
    optimizers.  ``throttled`` is the share of the time lost to a CPU quota, ``far_memory`` the share of its
    memory on other NUMA nodes.  ``uncertain`` is the error of its clock in microseconds.
    """

    rank: int
    host: str
    steps: list[tuple[int, float]]
    spans: list[Span] = field(default_factory=list)
    input: list[Span] = field(default_factory=list)
    optimizer: list[Span] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    threads: int = 0
    migrations: int = 0
    throttled: float = 0.0
    far_memory: float | None = None
    uncertain: float = 0.0

    @property
    def begin(self) -> float:
        return self.steps[0][1]

    @property
    def end(self) -> float:
        return self.steps[-1][1]

    @property
    def count(self) -> int:
        return len(self.steps) - 1
