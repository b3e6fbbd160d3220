"""Which ranks have never been heard, and from when on they are missed; pure."""

from __future__ import annotations

from collections.abc import Sequence

from cpulaunch.supervise.job.processes import SETTLE
from cpulaunch.supervise.job.rank import Rank


class Arrivals:
    """Ranks whose agents haven't said hello."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._all = len(ranks)
        self._unheard = {rank.rank: rank for rank in ranks}
        self._ended: dict[int, float] = {}  # of these, those whose agents have ended, and when
        self._last: float | None = None  # when the last one arrived

    def __bool__(self) -> bool:
        """Whether any has yet to arrive."""
        return bool(self._unheard)

    @property
    def none_yet(self) -> bool:
        return len(self._unheard) == self._all

    def arrived(self, rank: Rank, now: float) -> None:
        self._last = now
        self.expect_no_more(rank)

    def expect_no_more(self, rank: Rank) -> None:
        """It has arrived, or has not been started."""
        self._unheard.pop(rank.rank, None)
        self._ended.pop(rank.rank, None)

    def agent_ended(self, number: int, now: float) -> None:
        """The agent of rank ``number`` has; its hello may be on its way."""
        if number in self._unheard:
            self._ended[number] = now

    def first(self, host: str = "") -> Rank:
        """The first that hasn't arrived: of those on ``host``, if there are any."""
        names = (host, host.partition(".")[0])
        unheard = list(self._unheard.values())
        return next((rank for rank in unheard if rank.host in names), unheard[0])

    def without_agent(self, now: float) -> Rank | None:
        """One whose agent has ended before it said hello."""
        return next((self._unheard[number] for number, at in self._ended.items() if now >= at + SETTLE), None)

    def overdue(self, timeout: float, now: float) -> bool:
        """Whether some are still missing ``timeout`` seconds after the last one that has come."""
        return bool(self._unheard) and self._last is not None and now > self._last + timeout

    def forgive(self, asleep: float, now: float) -> None:
        """The launcher was stopped for ``asleep`` seconds, and heard nobody."""
        self._ended = dict.fromkeys(self._ended, now)
        if self._last is not None:
            self._last += asleep

    @property
    def wake_at(self) -> float | None:
        """When somebody may be missed by the end of its agent."""
        return min((ended_at + SETTLE for ended_at in self._ended.values()), default=None)
