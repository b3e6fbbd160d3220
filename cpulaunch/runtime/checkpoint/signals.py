"""Signals that ask a job to save and end: SIGTERM, and those that batch systems send before it."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

from cpulaunch.runtime.reports import saves_at

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

TWICE = 5.0
"""Seconds in which further signals count as copies of the first one, sent by another path."""

Late = Callable[[int, float], object]


class Signals:
    """Notes the first signal that asks the job to save.  A second one has its default effect.

    Signals within ``TWICE`` seconds of the first are ignored: Slurm signals every process of a step, so a
    rank gets the same signal again from its agent.

    Signals for which the script has its own handler are left to it, and forked processes are left alone.  If
    neither ``in_time`` nor ``forget`` is called within ``seconds`` seconds of the first signal, a thread
    calls ``late`` with the signal's number and ``seconds``.  It never does so if ``seconds`` is None.
    """

    def __init__(self, late: Late, seconds: float | None) -> None:
        self.arrived, self._arrived_at = 0, 0.0
        self._late, self._seconds = late, seconds
        self._ours: list[signal.Signals] = []
        self._wakeup_fd = -1
        self._in_time = threading.Event()
        weak = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _restore(weak()))

    def watch(self) -> None:
        """Note signals from now on.  Does nothing outside of the program's main thread."""
        if self._ours or threading.current_thread() is not threading.main_thread():
            return
        self._ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
        # Report before installing handlers: a signal that the agent sends in between just kills this process.
        saves_at(self._ours)
        for number in self._ours:
            signal.signal(number, self._note)
        if self._ours and self._seconds is not None:
            self._tell_when_late(self._seconds)

    def in_time(self) -> None:
        """Mark the request as handled: the state is saved, or won't be."""
        self._in_time.set()

    def forget(self) -> None:
        """Restore the signals' default handling."""
        self._in_time.set()
        self._restore()

    def _restore(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._ours:
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL)
        if self._ours:
            saves_at([])
        self._ours = []
        if self._wakeup_fd >= 0:
            if (other := signal.set_wakeup_fd(-1)) != self._wakeup_fd:
                signal.set_wakeup_fd(other)
            os.close(self._wakeup_fd)  # ends the thread
            self._wakeup_fd = -1

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.arrived:
            self.arrived, self._arrived_at = number, now
        elif now > self._arrived_at + TWICE:
            self._restore()
            os.kill(os.getpid(), number)

    def _tell_when_late(self, seconds: float) -> None:
        """Start the thread.  It is woken even if ``_note`` can't run, as in a collective that hangs."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        if (other := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(other)  # the script's own, for an event loop
            os.close(reading)
            os.close(writing)
            return
        self._wakeup_fd, self._in_time = writing, threading.Event()
        numbers, in_time = tuple(self._ours), self._in_time

        def wait() -> None:
            while (number := os.read(reading, 1)) and number[0] not in numbers:
                pass
            if number and not in_time.wait(seconds):
                self._late(number[0], seconds)
            while number and os.read(reading, 64):  # drain further bytes, for which Python needs a reader
                pass
            os.close(reading)

        threading.Thread(target=wait, name="cpulaunch-late", daemon=True).start()


def _restore(signals: Signals | None) -> None:
    if signals:
        signals._restore()
