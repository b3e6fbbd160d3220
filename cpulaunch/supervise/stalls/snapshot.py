"""What is known about a rank in a stall."""

from __future__ import annotations

from dataclasses import dataclass

from cpulaunch.messages import Dump
from cpulaunch.supervise.stalls import location
from cpulaunch.supervise.stalls.stacks import Frame, Process


@dataclass(frozen=True)
class Snapshot:
    """What is known about a rank when a stall is reported.

    ``left`` says how the rank ended, if it did.  ``dump`` is its agent's answer, if any.  ``raised_at`` is
    the place of its exception, if it failed.  ``now`` is the time of the report on its host's clock.
    ``leaving``: its program has announced its end.  ``collectives`` is the number of completed collectives.
    """

    rank: int
    host: str
    left: str = ""
    dump: Dump | None = None
    raised_at: str = ""
    now: float | None = None
    leaving: bool = False
    collectives: int = 0

    @property
    def program(self) -> Process | None:
        return self.dump.processes[0] if self.dump and self.dump.processes else None

    @property
    def place(self) -> Frame | None:
        return location.place(self.program) if self.program else None

    @property
    def at(self) -> str:
        return self.raised_at or (location.describe_place(self.program) if self.program else "")

    def line_of(self, caller: int) -> str:
        """Describe the place of the rank, or of its thread ``caller`` in an operation; "" if unknown."""
        if self.raised_at or self.program is None or location.place(self.program, caller) is None:
            return self.raised_at
        return location.describe_place(self.program, caller)

    def may_wait(self, caller: int) -> bool:
        """Whether the rank, or its thread ``caller``, may wait in the operation that it has called."""
        return self.program is None or location.may_wait(self.program, caller)

    @property
    def runs(self) -> bool:
        return self.program is not None and location.runs(self.program)

    @property
    def hold_reason(self) -> str:
        return location.hold_reason(self.program) if self.program else ""
