"""What is known of the launcher's own processes: mpiexec, or local agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpulaunch.messages import UNREACHED

if TYPE_CHECKING:
    from cpulaunch.launchers.base import Launcher, StartFailure

SETTLE = 1.0
"""Seconds in which messages may still arrive from ranks whose agent, or launcher process, has ended."""

MAX_SAID = 1 << 16
"""Bytes of what they say in which a reason is looked for."""


class Processes:
    """``count`` processes of a launcher, by what they say and how they end.

    ``unreached``: an agent has said that it can't reach us.  ``ended_at`` is when the last of them ended.
    """

    def __init__(self, count: int, launcher: Launcher) -> None:
        self.unreached = False
        self.ended_at: float | None = None
        self._count, self._launcher = count, launcher
        self._codes: dict[int, int] = {}
        self._said = b""

    def heard(self, data: bytes) -> None:
        self._said = (self._said + data)[-MAX_SAID:]
        self.unreached = self.unreached or UNREACHED.encode() in self._said

    def end(self, number: int, code: int, now: float) -> None:
        self._codes[number] = code
        self.no_more_than(self._count, now)

    def no_more_than(self, count: int, now: float) -> None:
        """There are ``count`` of them."""
        self._count = count
        if len(self._codes) == count:
            self.ended_at = now

    def start_failure(self, *, ended: bool) -> StartFailure | None:
        """The failed start that they have told of; ``ended``: nothing more will be said."""
        return self._launcher.start_failure(self._said.decode(errors="replace"), ended=ended)

    @property
    def cancellation(self) -> str:
        """Why a batch system has ended all ranks, where they have told of that; else empty."""
        return self._launcher.cancellation(self._said.decode(errors="replace"))

    @property
    def lost_hosts(self) -> tuple[str, ...]:
        """Hosts that have failed, as they have told."""
        return self._launcher.lost_hosts(self._said.decode(errors="replace"))

    @property
    def killed_by(self) -> int | None:
        """The signal that has ended one of them, if one has."""
        return next((-code for code in self._codes.values() if code < 0), None)

    @property
    def exit_code(self) -> int:
        """The first exit code that isn't 0, by the processes' order, as a shell reports it."""
        code = next((code for _, code in sorted(self._codes.items()) if code), 0)
        return 128 - code if code < 0 else code
