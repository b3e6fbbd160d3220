"""The part of a rank's trace that figures need.  Times are in microseconds since the trace's start."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COLLECTIVE = re.compile(r"(ccl|gloo|mpi|ucc):(\w+)")
"""Matches torch's names of events for collectives and messages."""

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
    """One rank's part of a collective."""

    backend: str
    kind: str
    begin: float
    end: float
    args: dict[str, Any]
    key: tuple[str, str, int] | None = None  # backend, group, number: the same in all ranks; None if unknown
    place: int = 0  # number of the row in which it is drawn
    last: float | None = None  # when the last rank began it; None if other ranks' parts are unknown
    last_rank: int | None = None  # the rank that began it last


class Note(NamedTuple):
    """The ledger's record of a collective."""

    backend: str
    group: str
    number: int
    kind: str
    at: float  # when it was called


@dataclass
class RankTrace:
    """One rank's trace."""

    rank: int
    host: str
    steps: list[tuple[int, float]]  # number and end; the end of the first one is the start of the trace
    spans: list[Span] = field(default_factory=list)  # of torch's operations
    input: list[Span] = field(default_factory=list)  # of its DataLoader
    optimizer: list[Span] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    threads: int = 0
    migrations: int = 0
    throttled: float = 0.0  # share of the time that a CPU quota took
    far_memory: float | None = None  # share of its memory on other NUMA nodes
    uncertain: float = 0.0  # maximum error of its clock

    @property
    def begin(self) -> float:
        return self.steps[0][1]

    @property
    def end(self) -> float:
        return self.steps[-1][1]

    @property
    def count(self) -> int:
        return len(self.steps) - 1
