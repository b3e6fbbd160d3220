"""What is kept of a rank's trace to find out what it says.  Times are in microseconds of the job's trace."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COLLECTIVE = re.compile(r"(ccl|gloo|mpi|ucc):(\w+)")
"""The name of an event that is a collective or a message under way: torch's own by convention."""

LOADER = "enumerate(DataLoader)#"
OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")


class Span(NamedTuple):
    """Something that a thread did."""

    name: str
    thread: int
    begin: float
    end: float


@dataclass
class Collective:
    """A collective of one rank.  ``key`` is the same in all ranks of its group: backend, group, number.

    ``place`` is where it is drawn, and ``last`` when the last rank began it, once that is known.
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
    """What a rank's own records say of a collective: ``at`` is when it was called."""

    backend: str
    group: str
    number: int
    kind: str
    at: float


@dataclass
class RankTrace:
    """One rank's trace: the time in which ``steps`` were traced, the spans of torch, and those of its loader
    and its optimizers.

    ``steps`` are numbers and the times of their ends; the first one is not traced.  ``throttled`` is the part
    of that time which a CPU quota has taken, ``far_memory`` that of its memory on other NUMA nodes.
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
