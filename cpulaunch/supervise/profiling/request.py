"""Choose the steps of a running job to trace, or explain why they cannot be traced.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cpulaunch.model.names import RANKS, Names
from cpulaunch.plan.plan import Plan
from cpulaunch.supervise.job.rank import Rank, RankState

MAX_STEPS = 1000
"""Maximum number of steps per trace."""

MAX_RANKS = 64
"""Maximum number of ranks per trace.  Each rank sends megabytes, and a larger picture is unreadable."""

LEAD = 1.0
"""Seconds in which a request reaches all programs, even if their agents are busy."""

_STARTING = " (while it starts, ask again a little later)"


def profiled_steps(plan: Plan) -> tuple[int, int] | None:
    """Return the first and last step that ``--profile`` names; None without it."""
    steps = plan.settings.watch.profile
    return None if steps == "none" else (steps.first, steps.last)


class Sample(NamedTuple):
    """The number of steps that a rank had made at the time ``at`` of the launcher's clock, in seconds."""

    steps: int
    at: float


def first_step(before: Sequence[Sample], after: Sequence[Sample]) -> int:
    """Return the first step that no rank will have begun when the request reaches it.

    ``before`` and ``after`` are two samples of each rank, to compute its rate of steps.
    """
    rates = [
        (late.steps - early.steps) / (late.at - early.at)
        for early, late in zip(before, after, strict=False)
        if late.at > early.at
    ]
    ahead = math.ceil(LEAD * max(rates, default=0.0))
    return max((sample.steps for sample in after), default=0) + ahead + 2


def why_untraceable(
    ranks: Sequence[Rank], wanted: Sequence[int], steps: int, names: Names = RANKS, *, current: bool = False
) -> str:
    """Return why the steps of the ``wanted`` ranks cannot be traced; empty if they can.

    ``wanted`` is sorted.  ``current``: the ranks' beats are up to date, so check them, too.
    """
    if not 0 < steps <= MAX_STEPS:
        return f"the number of steps must be from 1 to {MAX_STEPS}, got {steps}"
    if wanted and not 0 <= wanted[0] <= wanted[-1] < len(ranks):
        wrong = wanted[-1] if wanted[-1] >= len(ranks) else wanted[0]
        return f"there is no {names.one(wrong)}: {names.all_of(len(ranks))}"
    if len(wanted) > MAX_RANKS:
        too_many = f"at most {MAX_RANKS} {names.noun}s can be traced, got {len(wanted)}"
        return f"{too_many}: choose some with --ranks, such as 0-7"
    for number in wanted:
        rank, name = ranks[number], names.one(number)
        if rank.state is not RankState.RUNNING:
            return f"{name} on {rank.host} can't be traced: {rank.status}"
        if not current:
            continue
        if rank.beat is None or not rank.beat.keeps_ledger:
            return (
                f"{name} can't be traced yet: its program hasn't imported torch{_STARTING}, or isn't Python"
            )
        if not rank.beat.expects_steps:
            return f"{name} can't be traced yet: it hasn't created an optimizer of torch{_STARTING}"
    return ""
