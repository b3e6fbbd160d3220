"""The launcher's own processes (mpiexec or local agents): their output and exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpulaunch.messages import UNREACHED

if TYPE_CHECKING:
    from cpulaunch.launchers.base import Launcher, StartFailure

SETTLE = 1.0
"""Seconds in which messages may still arrive after the end of an agent or of a launcher's process."""

MAX_OUTPUT = 1 << 16
"""Bytes at the end of the output that are searched for a reason."""


class Processes:
    """The output and the end of a launcher's ``count`` processes.

    ``unreached``: an agent has printed that it can't reach the launcher.  ``ended_at`` is when the last
    process ended, or None.
    """

    def __init__(self, count: int, launcher: Launcher) -> None:
        self.unreached = False
        self.ended_at: float | None = None
        self._count, self._launcher = count, launcher
        self._codes: dict[int, int] = {}
        self._output = b""

    def add_output(self, data: bytes) -> None:
        self._output = (self._output + data)[-MAX_OUTPUT:]
        self.unreached = self.unreached or UNREACHED.encode() in self._output

    def end(self, number: int, code: int, now: float) -> None:
        self._codes[number] = code
        self.limit_count(self._count, now)

    def limit_count(self, count: int, now: float) -> None:
        """Record that only ``count`` processes were started, and that no more will be."""
        self._count = count
        if len(self._codes) == count:
            self.ended_at = now

    def start_failure(self, *, ended: bool) -> StartFailure | None:
        """Find a failed start in the output.  ``ended``: the output is complete."""
        return self._launcher.start_failure(self._output.decode(errors="replace"), ended=ended)

    @property
    def cancellation(self) -> str:
        """Why a batch system has ended all ranks, according to the output; empty if it has not."""
        return self._launcher.cancellation(self._output.decode(errors="replace"))

    @property
    def lost_hosts(self) -> tuple[str, ...]:
        """Hosts that have failed, according to the output."""
        return self._launcher.lost_hosts(self._output.decode(errors="replace"))

    @property
    def killed_by(self) -> int | None:
        """The signal that ended one of the processes, if any."""
        return next((-code for code in self._codes.values() if code < 0), None)

    @property
    def exit_code(self) -> int:
        """The first exit code other than 0, in the order of the processes, as a shell reports it."""
        code = next((code for _, code in sorted(self._codes.items()) if code), 0)
        return 128 - code if code < 0 else code
