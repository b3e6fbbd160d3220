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
"""The timeout ``auto`` before the first step: seconds that a rank has waited for others."""

FEW = 20
"""Collectives that a job without an optimizer may have completed before its first step: a barrier, and those
that wrapping a model takes."""

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
    """A rank's last beat, which came at ``heard_at``.

    ``gap`` is the longest time between two signs of progress, in seconds, without forgiven time.
    """

    beat: Beat
    heard_at: float
    gap: float = 0.0


class Pauses:
    """The time without progress, from beats and other signs of progress.

    ``progressed_at`` is the time of the last progress.  ``due`` is when a stall is due, as far as is known.
    ``look_at`` is when to call ``may_be_due`` again.
    """

    def __init__(self, ranks: Mapping[int, Rank], settings: StallSettings, now: float) -> None:
        self._ranks, self._settings = ranks, settings
        self.progressed_at = self.look_at = now
        self.due = inf
        self._known: dict[int, _Known] = {}
        self._asleep: dict[int, float] = {}  # time forgiven since a rank's last progress
        self._has_steps = self._expects_steps = False  # of any rank
        self._collectives = self._early = 0  # of the rank with most: in all, and before the first step

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
        """Don't count the last ``asleep`` seconds, in which no rank could be heard."""
        self.progressed_at = min(self.progressed_at + asleep, now)
        for rank in self._known:
            self._asleep[rank] = self._asleep.get(rank, 0.0) + asleep

    def leaves(self, rank: int) -> bool:
        """Whether a rank's program has announced its end."""
        return rank in self._known and self._known[rank].beat.leaving

    # ---- the first step

    @property
    def begun(self) -> bool:
        """Whether the job has reached its first step, so that any long pause counts."""
        if not self._settings.ledgers:
            return True
        return self._has_steps or (self._collectives > self._early and not self._expects_steps)

    @property
    def may_yet_begin(self) -> bool:
        """Whether the job counts as begun, but its first step may still be to come."""
        return self.begun and self._settings.ledgers and not self._has_steps and self._collectives <= FEW

    def begins_later(self) -> None:
        """Count the collectives completed so far as before the first step."""
        self._early = self._collectives

    # ---- what is due

    @property
    def timeout(self) -> float:
        """The timeout that applies now, in seconds."""
        if self._settings.timeout is not None:
            return self._settings.timeout
        if not self.begun:
            return BEGINNING
        # A rank's longest gap is an upper bound of the job's, so take the shortest of them.
        gaps = (k.gap for k in self._known.values() if k.beat.steps or k.beat.collectives)
        return max(SHORTEST, TIMES * min(gaps, default=0.0))

    def may_be_due(self, now: float) -> bool:
        """Whether to ask the agents, as a stall is due by their last beats, which may be old.

        Looks at all ranks only if enough time has passed since the last progress.
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
        # A timeout shorter than the time between beats must work, too: ask if any beat is missing or old.
        self.due = now
        return len(self._known) < len(self._ranks) or any(
            now > known.heard_at + shortest - ANSWERS for known in self._known.values()
        )

    def is_due(self, now: float) -> bool:
        """Whether a stall is due, by what is known now."""
        return now >= self._since() + self.timeout

    @property
    def since(self) -> float:
        """When the time without progress began.

        Before the first step, this is the later of the last progress and the time when a rank began to wait.
        """
        return since if (since := self._since()) < inf else self.progressed_at

    def _since(self) -> float:
        """As `since`, but infinite if no rank waits before the first step."""
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
