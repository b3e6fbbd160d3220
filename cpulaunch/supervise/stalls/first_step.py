"""Whether ranks that the others wait for before the first step do anything: a hang, or a long start.  Pure.

Imports, compiling and reading data take the CPU, of the program or of processes that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cpulaunch.messages import Dump
from cpulaunch.model.cores import CoreSet
from cpulaunch.supervise.stalls.inquiry import Question
from cpulaunch.supervise.stalls.location import held

AT_WORK = 0.005
"""Share of a core from which on a rank is at work."""

COMPUTES, TICKS = 0.1, 0.03
"""Share of a core from which on it computes, between two looks a moment apart; and seconds of it, as the
kernel counts hundredths."""


class SecondLook:
    """At ``due``, all are asked the ``question``, and ``idle`` says what came of it."""

    def __init__(self, ranks: Sequence[int], dumps: Mapping[int, Dump], period: float, now: float) -> None:
        """``ranks`` are those that are waited for, if any, ``dumps`` those of the first look."""
        self.ranks, self._period = ranks, period
        self.found = ""  # by the last look, in words
        self._before = dict(dumps)
        self.has_told = False
        self.question: Question | None = None
        self.again(now)

    def again(self, now: float) -> None:
        """Look again when the time has passed once more."""
        self.due, self.question = now + self._period, None

    @property
    def answers(self) -> Mapping[int, Dump]:
        """Those to the question."""
        return self.question.answers if self.question else {}

    def has_heard(self, ranks: Sequence[int]) -> bool:
        """Whether all of these have answered."""
        return self.answers.keys() >= set(ranks)

    def idle(self) -> bool:
        """Whether those who are waited for are known to have done nothing since the look before."""
        spent = [_share(self._before.get(rank), self.answers.get(rank)) for rank in self.ranks]
        self._before.update(self.answers)
        return bool(spent) and all(share is not None and share < AT_WORK for share in spent)

    @property
    def named(self) -> str:
        """``"rank 1"``."""
        return f"rank{'s' if len(self.ranks) > 1 else ''} {CoreSet(self.ranks)}"

    @property
    def are(self) -> str:
        return "are" if len(self.ranks) > 1 else "is"

    @property
    def promise(self) -> str:
        """What will come of it."""
        uses = "use" if len(self.ranks) > 1 else "uses"
        return (
            f"before the first step, it ends the job once {self.named} {uses} no CPU for {self._period:g} s"
        )


def computes(before: Dump | None, after: Dump | None) -> bool:
    """Whether a rank is known to have computed between two looks, or to have had to wait for a core."""
    if not (before and after) or (spent := _spent(before, after)) is None:
        return False
    return spent >= max(TICKS, COMPUTES * (after.at - before.at)) or bool(
        _runnable(before) & _runnable(after)
    )


def _runnable(dump: Dump) -> set[int]:
    """The processes whose main threads run, or would if others left them a core.

    A quota that takes it is what the report is to name.
    """
    return {each["pid"] for each in dump.processes if each["state"] == "R" and not held(each)}


def _share(before: Dump | None, after: Dump | None) -> float | None:
    """Of a core that has been used between two looks; None where that isn't known."""
    if not (before and after) or (spent := _spent(before, after)) is None:
        return None
    return spent / (after.at - before.at)


def _spent(before: Dump, after: Dump) -> float | None:
    """Seconds of the CPU that the program and its children have used since; a new child counts as work."""
    if not (before.processes and after.processes) or after.at <= before.at:
        return None
    earlier = {each["pid"]: each["cpu"] for each in before.processes}
    return float(sum(each["cpu"] - earlier.get(each["pid"], -1.0) for each in after.processes))
