"""Detect the stalls of independent programs.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cpulaunch.messages import Beat
from cpulaunch.model.names import Names
from cpulaunch.supervise.job.events import Action, ActOnStall, ReportStall
from cpulaunch.supervise.job.outcome import Stall
from cpulaunch.supervise.job.rank import Rank
from cpulaunch.supervise.stalls.detection import Stalls
from cpulaunch.supervise.stalls.inquiry import Inquiry
from cpulaunch.supervise.stalls.progress import StallSettings


class InstanceStalls:
    """Has the interface of `Stalls`, and one `Stalls` for each instance.

    Most instances have no optimizer, and none waits for others.  So if ``--stall-timeout`` is a number, there
    is no first step, and any output counts as progress.
    """

    def __init__(
        self, ranks: Sequence[Rank], settings: StallSettings, now: float, inquiry: Inquiry, names: Names
    ) -> None:
        if settings.timeout is not None:
            settings = settings._replace(ledgers=False)
        self._ranks = ranks
        self._watched = {
            rank.rank: Stalls([rank], settings, now, inquiry, names, names.one(rank.rank)) for rank in ranks
        }
        self._all = dict(self._watched)  # also of instances that aren't watched any more
        self._wake_at = {number: stalls.wake_at for number, stalls in self._watched.items()}
        self._reported: list[tuple[int, int]] = []  # (instance, index of its stall)

    def beat(self, rank: Rank, beat: Beat, now: float) -> list[Action]:
        return self._of(rank.rank, lambda its: its.beat(rank, beat, now))

    def add_progress(self, rank: Rank, now: float) -> list[Action]:
        return self._of(rank.rank, lambda its: its.add_progress(rank, now))

    def handle_end(self, rank: Rank, now: float) -> list[Action]:
        return self._of(rank.rank, lambda its: its.handle_end(rank, now))

    def handle_answer(self, rank: Rank, now: float) -> list[Action]:
        return self._of(rank.rank, lambda its: its.handle_answer(rank, now))

    def look(self, now: float) -> list[Action]:
        due = [number for number, at in self._wake_at.items() if at is not None and at <= now]
        return [action for number in due for action in self._of(number, lambda its: its.look(now))]

    def forgive(self, asleep: float, now: float) -> None:
        for number, its in self._watched.items():
            its.forgive(asleep, now)
            self._wake_at[number] = its.wake_at

    def end(self) -> None:
        for its in self._watched.values():
            its.end()

    @property
    def wake_at(self) -> float | None:
        return min((at for at in self._wake_at.values() if at is not None), default=None)

    @property
    def stalls(self) -> list[Stall]:
        """The stalls, in the order of their reports."""
        return [self._all[number].stalls[index] for number, index in self._reported]

    def describe(self, now: float) -> str:
        watched = (its for number, its in self._watched.items() if not self._ranks[number].state.final)
        return next((text for its in watched if (text := its.describe(now))), "")

    def _of(self, number: int, does: Callable[[Stalls], list[Action]]) -> list[Action]:
        """Return the actions for an instance, if it is still watched."""
        if self._ranks[number].state.final:
            self._forget(number)
        if not (its := self._watched.get(number)):
            return []
        actions = [self._numbered(number, action) for action in does(its)]
        self._wake_at[number] = its.wake_at
        if any(isinstance(action, ActOnStall) for action in actions):
            self._forget(number)
        return actions

    def _numbered(self, number: int, action: Action) -> Action:
        """Number a report among the reports of all instances.  Make it brief if several have stalled."""
        if not isinstance(action, ReportStall):
            return action
        self._reported.append((number, action.number - 1))
        brief = len({each for each, _ in self._reported}) > 1
        return action._replace(number=len(self._reported), brief=brief)

    def _forget(self, number: int) -> None:
        self._watched.pop(number, None)
        self._wake_at.pop(number, None)
