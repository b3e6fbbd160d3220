"""Measure the time without progress, and decide whether it is long enough for a stall.

Pure: each event comes with its time, on the launcher's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from cpulaunch.messages import Beat
from cpulaunch.supervise.job.rank import Rank, RankState

if TYPE_CHECKING:
    from cpulaunch.plan.plan import Plan

SHORTEST, TIMES = 60.0, 10.0
"""The timeout ``auto`` is ``TIMES`` times the longest gap so far, and at least ``SHORTEST`` seconds."""

BEGINNING = 600.0
"""The timeout ``auto`` before the first step, in seconds since a rank began to wait for others."""

FEW = 20
"""Maximum number of collectives before the first step of a job without an optimizer.

For example, wrapping a model takes some collectives.
"""

ANSWERS = 1.0
"""Seconds that ranks have to report progress before a stall counts."""

REPORT, ABORT, RESTART = "report", "abort", "restart"


class StallSettings(NamedTuple):
    """The user's settings for stalls.

    ``timeout`` is in seconds, 0 for never, None for ``auto``.  ``action`` is ``REPORT``, ``ABORT`` or
    ``RESTART``.  ``ledgers``: the program can keep a ledger.
    """

    timeout: float | None = None
    action: str = REPORT
    ledgers: bool = True

    @property
    def never(self) -> bool:
        """Whether nothing counts as a stall."""
        return self.timeout == 0 or (self.timeout is None and not self.ledgers)


@dataclass
class _Known:
    """A rank's last beat, which came at ``received_at``.

    ``gap`` is the longest time between two signs of progress, in seconds, without the time that `forgive`
    excluded.
    """

    beat: Beat
    received_at: float
    gap: float = 0.0


class Pauses:
    """Measures the time without progress, from beats and other signs of progress.

    ``progressed_at`` is the time of the last progress, and ``due`` the time at which a stall is due if none
    follows.  ``look_at`` is when to call ``may_be_due`` again.
    """

    def __init__(self, ranks: Mapping[int, Rank], settings: StallSettings, now: float) -> None:
        self._ranks, self._settings = ranks, settings
        self.progressed_at = self.look_at = now
        self.due = inf
        self._known: dict[int, _Known] = {}
        self._asleep: dict[int, float] = {}  # excluded time since a rank's last progress
        self._has_steps = self._expects_steps = False  # of any rank
        self._collectives = self._early = 0  # of the leading rank: so far, and before the first step

    def beat(self, rank: Rank, beat: Beat, now: float) -> bool:
        """Record a rank's beat; return whether it shows progress."""
        known, had_begun = self._known.get(rank.rank), self.begun
        more = known is None or _counts(beat) != _counts(known.beat)
        asleep = self._asleep.pop(rank.rank, 0.0) if more else 0.0
        before, gap = (known.beat.longest_gap, known.gap) if known else (0.0, 0.0)
        if beat.longest_gap > before:
            gap = max(gap, beat.longest_gap - asleep)
        self._known[rank.rank] = _Known(beat, now, gap)
        self._has_steps = self._has_steps or beat.steps > 0
        self._collectives = max(self._collectives, beat.collectives)
        self._expects_steps = self._expects_steps or beat.expects_steps
        if self.begun and not had_begun:
            self.look_at = now
        elif not self.begun and beat.waits_since is not None:
            since = max(self.progressed_at, beat.waits_since + rank.clock)
            self.look_at = min(self.look_at, since + self.timeout)
        return more

    def progress(self, at: float) -> None:
        self.progressed_at = max(self.progressed_at, at)

    def forgive(self, asleep: float, now: float) -> None:
        """Exclude the last ``asleep`` seconds, in which no message could be received."""
        self.progressed_at = min(self.progressed_at + asleep, now)
        for rank in self._known:
            self._asleep[rank] = self._asleep.get(rank, 0.0) + asleep

    def leaves(self, rank: int) -> bool:
        """Whether a rank's program has announced its end."""
        return rank in self._known and self._known[rank].beat.leaving

    # ---- the first step

    @property
    def begun(self) -> bool:
        """Whether the job has reached its first step.  From then on, any long pause is a stall."""
        if not self._settings.ledgers:
            return True
        return self._has_steps or (self._collectives > self._early and not self._expects_steps)

    @property
    def may_yet_begin(self) -> bool:
        """Whether ``begun`` is true only because of few collectives, so the first step may be yet to come."""
        return self.begun and self._settings.ledgers and not self._has_steps and self._collectives <= FEW

    def restart_beginning(self) -> None:
        """Let the collectives so far belong to the time before the first step."""
        self._early = self._collectives

    # ---- timing

    @property
    def timeout(self) -> float:
        """The timeout that applies now, in seconds."""
        if self._settings.timeout is not None:
            return self._settings.timeout
        if not self.begun:
            return BEGINNING
        # Each rank's longest gap is an upper bound of the job's longest gap, so take the minimum.
        gaps = (k.gap for k in self._known.values() if k.beat.steps or k.beat.collectives)
        return max(SHORTEST, TIMES * min(gaps, default=0.0))

    def may_be_due(self, now: float) -> bool:
        """Whether a stall is due according to the last beats, which may be old, so that agents must be asked.

        Costs time for each rank only if enough time has passed since the last progress.
        """
        shortest = self._settings.timeout or (SHORTEST if self.begun else BEGINNING)
        self.look_at = max(self.progressed_at + shortest, self.look_at)
        if now < self.look_at:
            return False
        if any(rank.state is RankState.NOT_STARTED for rank in self._ranks.values()):
            self.look_at = now + ANSWERS
            return False
        self.due = self._since() + self.timeout
        if now >= self.due:
            return True
        self.look_at = min(self.due, now + shortest)
        if self.begun:
            return False
        # The timeout may be shorter than the time between beats, so ask if any beat is missing or old.
        self.due = now
        return len(self._known) < len(self._ranks) or any(
            now > known.received_at + shortest - ANSWERS for known in self._known.values()
        )

    def is_due(self, now: float) -> bool:
        """Whether a stall is due now, according to the latest beats."""
        return now >= self._since() + self.timeout

    @property
    def since(self) -> float:
        """The start of the time without progress.

        Before the first step, this is the time when a rank began to wait, if it is after the last progress.
        """
        return since if (since := self._since()) < inf else self.progressed_at

    def _since(self) -> float:
        """Return `since`, but infinity if the first step is yet to come and no rank waits."""
        if self.begun:
            return self.progressed_at
        waits = (
            known.beat.waits_since + self._ranks[rank].clock
            for rank, known in self._known.items()
            if known.beat.waits_since is not None and self._ranks[rank].state is RankState.RUNNING
        )
        return max(self.progressed_at, min(waits, default=inf))


def _counts(beat: Beat) -> tuple[int, int, int, bool]:
    return beat.steps, beat.collectives, beat.printed, beat.leaving


def stall_settings(plan: Plan) -> StallSettings:
    timeout = plan.settings.watch.stall_timeout
    python = plan.program.python
    return StallSettings(None if timeout == "auto" else timeout, plan.settings.watch.stall_action, python)
