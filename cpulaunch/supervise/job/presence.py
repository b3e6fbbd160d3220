"""Whether ranks can be heard: their arrivals, heartbeats and clocks.  Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import takewhile
from math import inf

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


SHORT_TRIP = 0.05
"""Seconds that a question for the time and its answer may take for the answer to be good enough."""

ASK_AGAIN, ASK_AGAIN_AT_MOST = 1.0, 60.0
"""Seconds until an agent is asked again, whose answer took longer: they double with each that did."""

CLOCK_LASTS = 600.0
"""Seconds in which two clocks don't drift apart by more than that."""


class Clocks:
    """The clocks of ranks that aren't on the launcher's host.  What is known of each stands in its `Rank`."""

    def __init__(self) -> None:
        self._unsure: list[tuple[float, int, Rank]] = []  # a heap: when to ask again

    def asked(self, rank: Rank, now: float) -> None:
        """The rank's agent is asked for the time."""
        rank.asked_at = now

    def learn(self, rank: Rank, at: float, now: float) -> None:
        """Its clock showed ``at`` half-way between question and answer here."""
        if rank.asked_at == inf:
            return  # nobody has asked
        took = now - rank.asked_at
        if rank.measured_at is None or took <= rank.round_trip or now > rank.measured_at + CLOCK_LASTS:
            rank.clock = rank.asked_at + took / 2 - at
            rank.round_trip, rank.measured_at = took, now
        if rank.round_trip <= SHORT_TRIP:
            rank.ask_again = 0.0
        else:  # others had to be heard before, or it was busy, or the way there is long
            rank.ask_again = min(max(ASK_AGAIN, 2 * rank.ask_again), ASK_AGAIN_AT_MOST)
            heappush(self._unsure, (now + rank.ask_again, rank.rank, rank))

    def outdated(self, rank: Rank, now: float) -> bool:
        """Whether it was asked so long ago that its clock may have drifted."""
        return now > rank.asked_at + CLOCK_LASTS

    def due(self, now: float) -> Iterator[Rank]:
        """Ranks to ask again by now, as their answers took long."""
        while self._unsure and now >= self._unsure[0][0]:
            yield heappop(self._unsure)[2]
