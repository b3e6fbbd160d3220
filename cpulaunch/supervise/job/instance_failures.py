"""What is told of programs that fail while others go on: those that fail alike are one line; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cpulaunch.model.names import Names
from cpulaunch.supervise.job.rank import Rank
from cpulaunch.wording import shortened

MOMENT = 0.5
"""Seconds in which others fail for the same reason: only then it is known whether any goes on."""


class Failures:
    """Failures that haven't been told of yet."""

    def __init__(self, ranks: Sequence[Rank], names: Names) -> None:
        self._ranks, self._names = ranks, names
        self._waiting: dict[str, list[Rank]] = {}
        self._since = 0.0
        self._told = False

    def add(self, rank: Rank, why: str, now: float) -> None:
        """``rank`` has failed by itself."""
        if not self._waiting:
            self._since = now
        self._waiting.setdefault(why, []).append(rank)

    def take(self, now: float) -> list[str]:
        """The lines for those that have waited long enough."""
        return list(self._lines()) if self._waiting and now >= self._since + MOMENT else []

    def take_all(self) -> list[str]:
        """The lines at the job's end, where a box shows how the first one has failed: none for it alone."""
        return list(self._lines()) if self._told or len(self._waiting) > 1 else []

    def _lines(self) -> Iterator[str]:
        waiting, self._waiting = self._waiting, {}
        self._told = True
        others = self._others(sum(map(len, waiting.values())))
        for number, (why, ranks) in enumerate(waiting.items(), 1):
            hosts = shortened(list(dict.fromkeys(rank.host for rank in ranks)))
            last = others if number == len(waiting) else ""
            yield f"{self._names.several(rank.rank for rank in ranks)} on {hosts} failed: {why}{last}"

    def _others(self, failed: int) -> str:
        """Whether any goes on, beside so many that have just failed."""
        left = sum(not rank.state.final and not rank.candidate() for rank in self._ranks)
        if not left:
            return ""
        which = str(left) if left < len(self._ranks) - failed else "the"
        return f"; {which} other{'s go' if left > 1 else ' goes'} on"
