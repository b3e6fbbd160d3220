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
"""First and longest delay, in seconds, before a clock is measured again; the delay doubles each time."""

CLOCK_LASTS = 600.0
"""Seconds in which two clocks drift apart by no more than ``SHORT_TRIP``."""


class Arrivals:
    """Tracks the ranks whose agents haven't connected yet."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._all = len(ranks)
        self._missing = {rank.rank: rank for rank in ranks}
        self._ended: dict[int, float] = {}  # missing ranks whose agents have ended → time of the end
        self._last: float | None = None  # time of the last arrival

    def __bool__(self) -> bool:
        """Whether any rank has yet to arrive."""
        return bool(self._missing)

    @property
    def none_yet(self) -> bool:
        return len(self._missing) == self._all

    def arrived(self, rank: Rank, now: float) -> None:
        self._last = now
        self.expect_no_more(rank)

    def expect_no_more(self, rank: Rank) -> None:
        """Stop waiting for a rank: it has arrived, or was not started."""
        self._missing.pop(rank.rank, None)
        self._ended.pop(rank.rank, None)

    def agent_ended(self, number: int, now: float) -> None:
        """Record that the agent of rank ``number`` has ended.  Its first message may still arrive."""
        if number in self._missing:
            self._ended[number] = now

    def first(self, host: str = "") -> Rank:
        """Return the first rank that hasn't arrived; one on ``host``, if there is such a rank."""
        names = (host, host.partition(".")[0])
        unheard = list(self._missing.values())
        return next((rank for rank in unheard if rank.host in names), unheard[0])

    def without_agent(self, now: float) -> Rank | None:
        """Return a rank whose agent ended ``SETTLE`` seconds ago, and never connected."""
        return next((self._missing[number] for number, at in self._ended.items() if now >= at + SETTLE), None)

    def overdue(self, timeout: float, now: float) -> bool:
        """Whether ranks are still missing ``timeout`` seconds after the last arrival."""
        return bool(self._missing) and self._last is not None and now > self._last + timeout

    def forgive(self, asleep: float, now: float) -> None:
        """Extend all deadlines, because the launcher was suspended for ``asleep`` seconds."""
        self._ended = dict.fromkeys(self._ended, now)
        if self._last is not None:
            self._last += asleep

    @property
    def wake_at(self) -> float | None:
        """When the next rank counts as missing because its agent has ended."""
        return min((ended_at + SETTLE for ended_at in self._ended.values()), default=None)


class Heartbeats:
    """Tracks the heartbeats of ranks.  The cost of `silent` depends on the number of silent ranks only."""

    def __init__(self) -> None:
        self._by_silence: OrderedDict[int, Rank] = OrderedDict()  # by the time of the last message

    def expect(self, rank: Rank, now: float) -> None:
        rank.last_message_at = now
        self._by_silence[rank.rank] = rank

    def record(self, rank: Rank, now: float) -> None:
        rank.last_message_at = now
        if rank.rank in self._by_silence:
            self._by_silence.move_to_end(rank.rank)

    def expect_no_more(self, rank: Rank) -> None:
        self._by_silence.pop(rank.rank, None)

    def silent(self, seconds: float, now: float) -> list[Rank]:
        return list(takewhile(lambda rank: now > rank.last_message_at + seconds, self._by_silence.values()))

    def forgive(self, asleep: float, now: float) -> None:
        """Don't count the last ``asleep`` seconds as silence, as no message could be received."""
        for rank in self._by_silence.values():
            rank.last_message_at = min(rank.last_message_at + asleep, now)


class Clocks:
    """Measures the clocks of ranks on other hosts.  Each `Rank` has its last measurement."""

    def __init__(self) -> None:
        self._unsure: list[tuple[float, int, Rank]] = []  # a heap of (when to ask again, number, rank)

    def learn(self, rank: Rank, at: float, now: float) -> None:
        """Set the clock of ``rank``, which showed ``at`` half-way through the round trip.

        A more precise measurement is kept for ``CLOCK_LASTS`` seconds.
        """
        if rank.asked_at == inf:
            return  # an answer without a request
        took = now - rank.asked_at
        if rank.measured_at is None or took <= rank.round_trip or now > rank.measured_at + CLOCK_LASTS:
            rank.clock = rank.asked_at + took / 2 - at
            rank.round_trip, rank.measured_at = took, now
        if rank.round_trip <= SHORT_TRIP:
            rank.ask_again = 0.0
        else:
            rank.ask_again = min(max(ASK_AGAIN, 2 * rank.ask_again), ASK_AGAIN_AT_MOST)
            heappush(self._unsure, (now + rank.ask_again, rank.rank, rank))

    def outdated(self, rank: Rank, now: float) -> bool:
        """Whether the last measurement was so long ago that the clock may have drifted."""
        return now > rank.asked_at + CLOCK_LASTS

    def due(self, now: float) -> Iterator[Rank]:
        """Yield the ranks whose clocks are to be measured again now."""
        while self._unsure and now >= self._unsure[0][0]:
            yield heappop(self._unsure)[2]
