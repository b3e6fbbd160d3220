"""When the ranks that run were last heard, and which have been silent for too long; pure."""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

from cpulaunch.supervise.job.rank import Rank


class Heartbeats:
    """Ranks that should be heard.  A look at them costs no more than those that are silent."""

    def __init__(self) -> None:
        self._heard_last: OrderedDict[int, Rank] = OrderedDict()  # the longest ago first

    def expect(self, rank: Rank, now: float) -> None:
        rank.heard_at = now
        self._heard_last[rank.rank] = rank

    def heard(self, rank: Rank, now: float) -> None:
        rank.heard_at = now
        if rank.rank in self._heard_last:
            self._heard_last.move_to_end(rank.rank)

    def expect_no_more(self, rank: Rank) -> None:
        self._heard_last.pop(rank.rank, None)

    def silent(self, seconds: float, now: float) -> list[Rank]:
        """Those that haven't been heard for so long."""
        return list(takewhile(lambda rank: now > rank.heard_at + seconds, self._heard_last.values()))

    def forgive(self, asleep: float, now: float) -> None:
        """For ``asleep`` seconds, nobody could be heard."""
        for rank in self._heard_last.values():
            rank.heard_at = min(rank.heard_at + asleep, now)
