"""What one of a job's programs is called, in messages and in the names of files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cpulaunch.model.cores import CoreSet


class Names(NamedTuple):
    """Programs are known to cpulaunch by their rank; people know them as ranks, or as instances.

    ``first`` is the number of rank 0: not 0 where it is the only instance to run, of many.
    """

    noun: str = "rank"
    first: int = 0

    def number(self, rank: int) -> int:
        return self.first + rank

    def one(self, rank: int) -> str:
        """``"rank 3"``, ``"instance 3"``."""
        return f"{self.noun} {self.number(rank)}"

    def several(self, ranks: Iterable[int]) -> str:
        """``"rank 3"``, ``"instances 0-2,5"``."""
        numbers = CoreSet(map(self.number, ranks))
        return f"{self.noun}{'' if len(numbers) == 1 else 's'} {numbers}"

    def all_of(self, count: int) -> str:
        """``"the ranks are 0 to 3"``, ``"the only instance is 5"``."""
        first, last = self.number(0), self.number(count - 1)
        return f"the only {self.noun} is {first}" if count == 1 else f"the {self.noun}s are {first} to {last}"

    def log(self, rank: int) -> str:
        """The name of its log."""
        return f"{self.noun}-{self.number(rank)}.log"


RANKS = Names()
INSTANCE = "instance"
