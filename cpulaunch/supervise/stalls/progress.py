"""How long nothing has happened in a job, and whether that is long enough for a stall.

Pure: it is told of what ranks say with the time, on the launcher's clock.
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
"""``auto``: so many seconds at least, and so many times the longest gap so far."""

BEGINNING = 600.0
"""``auto`` before the first step: so many seconds, which somebody has waited for others."""

FEW = 20
"""Collectives that a job without an optimizer may have completed and yet be before its first step: a
barrier, and what wrapping a model takes."""

ANSWERS = 1.0
"""Seconds in which ranks can say that there is progress after all."""

REPORT, ABORT, RESTART = "report", "abort", "restart"


class StallSettings(NamedTuple):
    """``timeout`` is in seconds, 0 for never, None for ``auto``.  ``ledgers``: the program can keep one."""

    timeout: float | None = None
    action: str = REPORT
    ledgers: bool = True

    @property
    def never(self) -> bool:
        """Whether nothing counts as a stall."""
        return self.timeout == 0 or (self.timeout is None and not self.ledgers)


@dataclass
class _Known:
    """What a rank's beats say; ``heard_at`` is when the last one came.

    ``gap`` is the longest between two signs of progress, in seconds, without what was forgiven.
    """

    beat: Beat
    heard_at: float
    gap: float = 0.0


class Pauses:
    """Told of beats and progress.

    ``progressed_at`` is when something has happened last, ``due`` when a stall is, as far as is known, and
    ``look_at`` when to ask again whether it ``may_be_due``.
    """

    def __init__(self, ranks: Mapping[int, Rank], settings: StallSettings, now: float) -> None:
        self._ranks, self._settings = ranks, settings
        self.progressed_at = self.look_at = now
        self.due = inf
        self._known: dict[int, _Known] = {}
        self._asleep: dict[int, float] = {}  # what was forgiven since a rank's last progress
        self._has_steps = self._expects_steps = False  # whether any rank has, or does
        self._collectives = self._early = 0  # of the rank with most; those that were before the first step

    def beat(self, rank: Rank, beat: Beat, now: float) -> bool:
        """A rank says how far it is; whether that is further than before."""
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
        """Something has happened."""
        self.progressed_at = max(self.progressed_at, at)

    def forgive(self, asleep: float, now: float) -> None:
        """For so long, nobody could have said anything."""
        self.progressed_at = min(self.progressed_at + asleep, now)
        for rank in self._known:
            self._asleep[rank] = self._asleep.get(rank, 0.0) + asleep

    def leaves(self, rank: int) -> bool:
        """Whether its program has said that it ends."""
        return rank in self._known and self._known[rank].beat.leaving

    # ---- the first step

    @property
    def begun(self) -> bool:
        """Whether the job has come to its first step, so that any pause is worth a word."""
        if not self._settings.ledgers:
            return True
        return self._has_steps or (self._collectives > self._early and not self._expects_steps)

    @property
    def may_yet_begin(self) -> bool:
        """Whether the job counts as begun, though its first step may be still to come."""
        return self.begun and self._settings.ledgers and not self._has_steps and self._collectives <= FEW

    def begins_later(self) -> None:
        """What was completed so far came before the first step."""
        self._early = self._collectives

    # ---- what is due

    @property
    def timeout(self) -> float:
        """Seconds."""
        if self._settings.timeout is not None:
            return self._settings.timeout
        if not self.begun:
            return BEGINNING
        # The job's longest gap is shorter than any of its ranks'.
        gaps = (k.gap for k in self._known.values() if k.beat.steps or k.beat.collectives)
        return max(SHORTEST, TIMES * min(gaps, default=0.0))

    def may_be_due(self, now: float) -> bool:
        """Whether agents have to be asked: a stall would be due by what is known, which may be old.

        All ranks are looked at only if that has been so for long enough.
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
        # Beats that come later than the timeout is long must not keep us from counting.
        self.due = now
        return len(self._known) < len(self._ranks) or any(
            now > known.heard_at + shortest - ANSWERS for known in self._known.values()
        )

    def is_due(self, now: float) -> bool:
        """Whether one is, by what is known now."""
        return now >= self._since() + self.timeout

    @property
    def since(self) -> float:
        """Since when nothing has happened, and before the first step, somebody is known to wait."""
        return since if (since := self._since()) < inf else self.progressed_at

    def _since(self) -> float:
        """Since when nothing has happened, and before the first step, somebody has waited, too; or never."""
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
    """What the user has asked for."""
    timeout = plan.settings.watch.stall_timeout
    python = plan.program.python
    return StallSettings(None if timeout == "auto" else timeout, plan.settings.watch.stall_action, python)
