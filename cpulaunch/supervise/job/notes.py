"""What agents have to note, for people: the same from many ranks and hosts is one line; pure."""

from __future__ import annotations

import re

from cpulaunch.model.names import INSTANCE, RANKS, Names
from cpulaunch.supervise.job.rank import Rank
from cpulaunch.wording import shortened

MOMENT = 0.5
"""Seconds in which ranks say what others say, too."""

START = 5.0
"""The same while ranks have yet to start: those of a thousand hosts do so one after the other."""

_OF_RANK = re.compile(rf"(?:{RANKS.noun}|{INSTANCE}) \d+\b(?P<what>.*)", re.DOTALL)


class Notes:
    """Notes that wait for their like."""

    def __init__(self, names: Names = RANKS) -> None:
        self._names = names
        self._waiting: dict[tuple[bool, str], list[Rank]] = {}
        self._since = 0.0

    def add(self, rank: Rank, note: str, now: float) -> None:
        """A note that begins with the name of its rank is the same as another's that goes on alike."""
        if not self._waiting:
            self._since = now
        of_rank = _OF_RANK.fullmatch(note)
        self._waiting.setdefault((True, of_rank["what"]) if of_rank else (False, note), []).append(rank)

    def take(self, now: float, *, starting: bool = False) -> list[str]:
        """The lines for those that have waited long enough."""
        return self.take_all() if now >= self._since + (START if starting else MOMENT) else []

    def take_all(self) -> list[str]:
        waiting, self._waiting = self._waiting, {}
        return [_line(*key, ranks, self._names) for key, ranks in waiting.items()]


def _line(of_rank: bool, what: str, ranks: list[Rank], names: Names) -> str:
    hosts = shortened(list(dict.fromkeys(rank.host for rank in ranks)))
    if not of_rank:
        return f"{hosts}: {what}"
    numbers = {rank.rank for rank in ranks}
    if len(numbers) > 1 and what.startswith(" was "):
        what = what.replace(" was ", " were ", 1)
    return f"{hosts}: {names.several(numbers)}{what}"
