"""What the clocks of other hosts show, compared with the launcher's by questions and their answers; pure."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf

from cpulaunch.supervise.job.rank import Rank

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
