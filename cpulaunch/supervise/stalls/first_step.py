"""Distinguish a hang before the first step from a long start, by the CPU time of the ranks.  Pure.

Imports, compiling and reading data take CPU time, of the program or of processes that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cpulaunch.messages import Dump
from cpulaunch.model.names import RANKS
from cpulaunch.supervise.stalls.inquiry import Question
from cpulaunch.supervise.stalls.location import hold_reason

AT_WORK = 0.005
"""Minimum share of a core that a rank at work uses."""

COMPUTES, TICKS = 0.1, 0.03
"""A rank computes if it uses this share of a core between two dumps, and at least ``TICKS`` seconds.

The time between the dumps is short, and the kernel counts CPU time in hundredths of a second.
"""


class SecondLook:
    """A later look at ranks: at ``due``, all are asked the ``question``; `are_idle` evaluates the answers."""

    def __init__(self, ranks: Sequence[int], dumps: Mapping[int, Dump], period: float, now: float) -> None:
        """``ranks`` are the ranks that the others wait for, if any.  ``dumps`` are from the first look.

        ``period`` is the time between two looks, in seconds.
        """
        self.ranks, self._period = ranks, period
        self.found = ""  # the headline of the last look
        self._before = dict(dumps)
        self.reported = False
        self.question: Question | None = None
        self.again(now)

    def again(self, now: float) -> None:
        self.due, self.question = now + self._period, None

    @property
    def answers(self) -> Mapping[int, Dump]:
        return self.question.answers if self.question else {}

    def is_answered_by(self, ranks: Sequence[int]) -> bool:
        return self.answers.keys() >= set(ranks)

    def are_idle(self) -> bool:
        """Whether all ``ranks`` are known to have been idle since the previous look."""
        spent = [_share(self._before.get(rank), self.answers.get(rank)) for rank in self.ranks]
        self._before.update(self.answers)
        return bool(spent) and all(share is not None and share < AT_WORK for share in spent)

    def promise(self, action: str) -> str:
        """Say when ``--stall-action ACTION`` will end the job."""
        use = f"{RANKS.several(self.ranks)} {'use' if len(self.ranks) > 1 else 'uses'}"
        ends = f"--stall-action {action} ends the job"
        return f"before the first step, {ends} once {use} no CPU for {self._period:g} s"


def computes(before: Dump | None, after: Dump | None) -> bool:
    """Whether a rank is known to have computed between two dumps, or to have waited for a core."""
    if not (before and after) or (spent := _spent(before, after)) is None:
        return False
    return spent >= max(TICKS, COMPUTES * (after.at - before.at)) or bool(
        _runnable(before) & _runnable(after)
    )


def _runnable(dump: Dump) -> set[int]:
    """Return the processes whose main threads run or wait for a core.

    Processes that can't run, for example because of a CPU quota, don't count: the report shows the reason.
    """
    return {each["pid"] for each in dump.processes if each["state"] == "R" and not hold_reason(each)}


def _share(before: Dump | None, after: Dump | None) -> float | None:
    """Return the share of a core that was used between two dumps; None if unknown."""
    if not (before and after) or (spent := _spent(before, after)) is None:
        return None
    return spent / (after.at - before.at)


def _spent(before: Dump, after: Dump) -> float | None:
    """Return the seconds of CPU time that the program and its children used between two dumps.

    A new child counts as one more second.  None if unknown.
    """
    if not (before.processes and after.processes) or after.at <= before.at:
        return None
    earlier = {each["pid"]: each["cpu"] for each in before.processes}
    return float(sum(each["cpu"] - earlier.get(each["pid"], -1.0) for each in after.processes))
