"""Names of ranks and instances, in messages and in file names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cpulaunch.model.cores import CoreSet


class Names(NamedTuple):
    """Names of a job's ranks, which are called instances in a job of independent programs.

    ``first`` is the number shown for rank 0.  It isn't 0 if only one of several instances runs.
    """

    noun: str = "rank"
    first: int = 0

    def number(self, rank: int) -> int:
        return self.first + rank

    def one(self, rank: int) -> str:
        """Return ``"rank 3"`` or ``"instance 3"``."""
        return f"{self.noun} {self.number(rank)}"

    def several(self, ranks: Iterable[int]) -> str:
        """Return ``"rank 3"`` or ``"instances 0-2,5"``."""
        numbers = CoreSet(map(self.number, ranks))
        return f"{self.noun}{'' if len(numbers) == 1 else 's'} {numbers}"

    def all_of(self, count: int) -> str:
        """Return ``"the ranks are 0 to 3"`` or ``"the only instance is 5"``."""
        first, last = self.number(0), self.number(count - 1)
        return f"the only {self.noun} is {first}" if count == 1 else f"the {self.noun}s are {first} to {last}"

    def log(self, rank: int) -> str:
        """Return the name of a rank's log file."""
        return f"{self.noun}-{self.number(rank)}.log"


RANKS = Names()
INSTANCE = "instance"
