"""Combine equal notes of several ranks, or equal failures while other ranks go on, into one line.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cpulaunch.model.hosts import fold_hosts
from cpulaunch.model.names import RANKS, Names
from cpulaunch.supervise.job.rank import Rank

MOMENT = 0.5
"""Seconds to wait for other ranks that send the same note, or fail for the same reason."""

START = 5.0
"""Seconds to wait for equal notes while ranks start, as they start one after the other."""


class Notes:
    """Collects notes, to show equal notes of several ranks as one line."""

    def __init__(self, names: Names = RANKS) -> None:
        self._names = names
        self._waiting: dict[tuple[bool, str], list[Rank]] = {}
        self._since = 0.0

    def add(self, rank: Rank, note: str, now: float) -> None:
        """Add a note.  Notes are equal if they differ only in their rank's name at the start."""
        if not self._waiting:
            self._since = now
        what = note.removeprefix(self._names.one(rank.rank))
        self._waiting.setdefault((what != note, what), []).append(rank)

    def take(self, now: float, *, starting: bool = False) -> list[str]:
        """Return the lines for all notes, once the first of them has waited long enough."""
        return self.take_all() if now >= self._since + (START if starting else MOMENT) else []

    def take_all(self) -> list[str]:
        waiting, self._waiting = self._waiting, {}
        return [_line(*key, ranks, self._names) for key, ranks in waiting.items()]


def _line(of_rank: bool, what: str, ranks: list[Rank], names: Names) -> str:
    hosts = fold_hosts(dict.fromkeys(rank.host for rank in ranks))
    if not of_rank:
        return f"{hosts}: {what}"
    numbers = {rank.rank for rank in ranks}
    if len(numbers) > 1 and what.startswith(" was "):
        what = what.replace(" was ", " were ", 1)
    return f"{hosts}: {names.several(numbers)}{what}"


class Failures:
    """Collects failures that have not been shown yet."""

    def __init__(self, ranks: Sequence[Rank], names: Names) -> None:
        self._ranks, self._names = ranks, names
        self._waiting: dict[str, list[Rank]] = {}
        self._since = 0.0
        self._has_shown = False

    def add(self, rank: Rank, why: str, now: float) -> None:
        if not self._waiting:
            self._since = now
        self._waiting.setdefault(why, []).append(rank)

    def take(self, now: float) -> list[str]:
        """Return the lines for all failures, once the first of them has waited long enough."""
        return list(self._lines()) if self._waiting and now >= self._since + MOMENT else []

    def take_all(self) -> list[str]:
        """Return the lines at the job's end; none if there is only one reason, which the box shows."""
        return list(self._lines()) if self._has_shown or len(self._waiting) > 1 else []

    def _lines(self) -> Iterator[str]:
        waiting, self._waiting = self._waiting, {}
        self._has_shown = True
        others = self._others(sum(map(len, waiting.values())))
        for number, (why, ranks) in enumerate(waiting.items(), 1):
            hosts = fold_hosts(dict.fromkeys(rank.host for rank in ranks))
            last = others if number == len(waiting) else ""
            yield f"{self._names.several(rank.rank for rank in ranks)} on {hosts} failed: {why}{last}"

    def _others(self, failed: int) -> str:
        """Say how many ranks go on after ``failed`` ranks have just failed; empty if none does."""
        left = sum(not rank.state.final and not rank.candidate() for rank in self._ranks)
        if not left:
            return ""
        which = str(left) if left < len(self._ranks) - failed else "the"
        return f"; {which} other{'s go' if left > 1 else ' goes'} on"
