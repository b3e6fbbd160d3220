"""The presence of ranks: their arrivals, heartbeats and clocks.  Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import takewhile
from math import inf

from cpulaunch.supervise.job.processes import SETTLE
from cpulaunch.supervise.job.rank import Rank

SHORT_TRIP = 0.05
"""The longest round trip, in seconds, of a clock measurement that is accurate enough."""

ASK_AGAIN, ASK_AGAIN_AT_MOST = 1.0, 60.0
"""Seconds until an agent is asked again after a longer round trip: the first delay, which doubles each time,
and the longest."""

CLOCK_LASTS = 600.0
"""Seconds in which two clocks drift apart by no more than ``SHORT_TRIP``."""


class Arrivals:
    """Ranks whose agents haven't said hello."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._all = len(ranks)
        self._unheard = {rank.rank: rank for rank in ranks}
        self._ended: dict[int, float] = {}  # unheard ranks whose agents have ended → when
        self._last: float | None = None  # when the last one arrived

    def __bool__(self) -> bool:
        """Whether any rank has yet to arrive."""
        return bool(self._unheard)

    @property
    def none_yet(self) -> bool:
        return len(self._unheard) == self._all

    def arrived(self, rank: Rank, now: float) -> None:
        self._last = now
        self.expect_no_more(rank)

    def expect_no_more(self, rank: Rank) -> None:
        """Stop waiting for a rank: it has arrived, or was not started."""
        self._unheard.pop(rank.rank, None)
        self._ended.pop(rank.rank, None)

    def agent_ended(self, number: int, now: float) -> None:
        """Note that the agent of rank ``number`` has ended.  Its hello may still be under way."""
        if number in self._unheard:
            self._ended[number] = now

    def first(self, host: str = "") -> Rank:
        """Return the first rank that hasn't arrived, on ``host`` if there is one."""
        names = (host, host.partition(".")[0])
        unheard = list(self._unheard.values())
        return next((rank for rank in unheard if rank.host in names), unheard[0])

    def without_agent(self, now: float) -> Rank | None:
        """Return a rank whose agent ended ``SETTLE`` seconds ago without saying hello."""
        return next((self._unheard[number] for number, at in self._ended.items() if now >= at + SETTLE), None)

    def overdue(self, timeout: float, now: float) -> bool:
        """Whether ranks are still missing ``timeout`` seconds after the last arrival."""
        return bool(self._unheard) and self._last is not None and now > self._last + timeout

    def forgive(self, asleep: float, now: float) -> None:
        """Move all deadlines: the launcher was stopped for ``asleep`` seconds, and heard no agent."""
        self._ended = dict.fromkeys(self._ended, now)
        if self._last is not None:
            self._last += asleep

    @property
    def wake_at(self) -> float | None:
        """When the next rank counts as missing because its agent has ended."""
        return min((ended_at + SETTLE for ended_at in self._ended.values()), default=None)


class Heartbeats:
    """Ranks whose heartbeats are expected.  `silent` costs time for silent ranks only."""

    def __init__(self) -> None:
        self._heard_last: OrderedDict[int, Rank] = OrderedDict()  # by the time of the last message

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
        return list(takewhile(lambda rank: now > rank.heard_at + seconds, self._heard_last.values()))

    def forgive(self, asleep: float, now: float) -> None:
        """Don't count the last ``asleep`` seconds as silence: no rank could be heard."""
        for rank in self._heard_last.values():
            rank.heard_at = min(rank.heard_at + asleep, now)


class Clocks:
    """The clocks of ranks that aren't on the launcher's host.  Measurements are kept in each `Rank`."""

    def __init__(self) -> None:
        self._unsure: list[tuple[float, int, Rank]] = []  # a heap of (when to ask again, number, rank)

    def learn(self, rank: Rank, at: float, now: float) -> None:
        """Set the clock of ``rank``: it showed ``at`` half-way between the question and the answer here.

        A worse measurement doesn't replace a better one that is not older than ``CLOCK_LASTS``.
        """
        if rank.asked_at == inf:
            return  # an answer without a question
        took = now - rank.asked_at
        if rank.measured_at is None or took <= rank.round_trip or now > rank.measured_at + CLOCK_LASTS:
            rank.clock = rank.asked_at + took / 2 - at
            rank.round_trip, rank.measured_at = took, now
        if rank.round_trip <= SHORT_TRIP:
            rank.ask_again = 0.0
        else:  # other messages came first, the agent was busy, or the network is slow
            rank.ask_again = min(max(ASK_AGAIN, 2 * rank.ask_again), ASK_AGAIN_AT_MOST)
            heappush(self._unsure, (now + rank.ask_again, rank.rank, rank))

    def outdated(self, rank: Rank, now: float) -> bool:
        """Whether the last question was so long ago that the clock may have drifted."""
        return now > rank.asked_at + CLOCK_LASTS

    def due(self, now: float) -> Iterator[Rank]:
        """Yield the ranks to ask again now, as their answers took long."""
        while self._unsure and now >= self._unsure[0][0]:
            yield heappop(self._unsure)[2]
