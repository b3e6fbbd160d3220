"""Whether ranks that the others wait for before the first step do anything: a hang, or a long start.  Pure.

Imports, compiling and reading data take the CPU, of the program or of processes that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cpulaunch.messages import Dump
from cpulaunch.model.cores import CoreSet

AT_WORK = 0.005
"""Share of a core from which on a rank is at work."""


class SecondLook:
    """At ``due``, ``ask`` the ranks; ``heard`` has their answers, and then ``idle`` says what came of it."""

    def __init__(self, ranks: Sequence[int], dumps: Mapping[int, Dump], period: float, now: float) -> None:
        """``dumps`` are those of the first look."""
        self._ranks, self._period = ranks, period
        self._before = {rank: dumps[rank] for rank in ranks if rank in dumps}
        self.has_told = False
        self.again(now)

    def again(self, now: float) -> None:
        """Look again when the time has passed once more."""
        self.due, self.asked = now + self._period, False
        self._after: dict[int, Dump] = {}

    def ask(self) -> Sequence[int]:
        """The ranks to be asked."""
        self.asked = True
        return self._ranks

    def heard(self, rank: int, dump: Dump) -> None:
        """One of them has answered."""
        self._after[rank] = dump

    @property
    def complete(self) -> bool:
        """Whether all have."""
        return self._after.keys() >= set(self._ranks)

    def idle(self) -> bool:
        """Whether all are known to have done nothing since they were looked at before."""
        spent = [_share(self._before.get(rank), self._after.get(rank)) for rank in self._ranks]
        self._before |= self._after
        return all(share is not None and share < AT_WORK for share in spent)

    @property
    def named(self) -> str:
        """``"rank 1"``."""
        return f"rank{'s' if len(self._ranks) > 1 else ''} {CoreSet(self._ranks)}"

    @property
    def are(self) -> str:
        return "are" if len(self._ranks) > 1 else "is"

    @property
    def promise(self) -> str:
        """What will come of it."""
        uses = "use" if len(self._ranks) > 1 else "uses"
        return (
            f"before the first step, it ends the job once {self.named} {uses} no CPU for {self._period:g} s"
        )


def _share(before: Dump | None, after: Dump | None) -> float | None:
    """Of a core that the program and its children have used between two looks; a new child counts as work."""
    if not (before and after and before.processes and after.processes) or after.at <= before.at:
        return None
    earlier = {each["pid"]: each["cpu"] for each in before.processes}
    spent = sum(each["cpu"] - earlier.get(each["pid"], -1.0) for each in after.processes)
    return float(spent) / (after.at - before.at)
