"""Signals that ask a job to save and end: SIGTERM, and SIGUSR1 and SIGUSR2 of batch systems."""

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

DUPLICATE = 5.0
"""Seconds in which further signals are ignored as copies of the first one."""

Late = Callable[[int, float], object]


class Signals:
    """Records the first signal that asks the job to save; ``arrived`` is its number, or 0.

    A second signal has its default effect, unless it arrives within ``DUPLICATE`` seconds: Slurm signals all
    processes of a step, so a rank gets the same signal from Slurm and from its agent.  A signal for which the
    script has a handler is not handled here, nor is any signal in a forked process.

    If neither ``mark_handled`` nor ``restore`` is called within ``seconds`` seconds of the first signal, a
    thread calls ``late(signal number, seconds)``.  None means no thread.
    """

    def __init__(self, late: Late, seconds: float | None) -> None:
        self.arrived, self._arrived_at = 0, 0.0
        self._late, self._seconds = late, seconds
        self._ours: list[signal.Signals] = []
        self._wakeup_fd = -1
        self._handled = threading.Event()
        weak = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _restore(weak()))

    def watch(self) -> None:
        """Install the handlers.  Does nothing outside of the main thread."""
        if self._ours or threading.current_thread() is not threading.main_thread():
            return
        self._ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
        # Report the signals before the handlers exist: if the agent sends a signal now, the process ends.
        saves_at(self._ours)
        for number in self._ours:
            signal.signal(number, self._note)
        if self._ours and self._seconds is not None:
            self._start_thread(self._seconds)

    def mark_handled(self) -> None:
        """Mark the request as handled, after saving has succeeded or failed."""
        self._handled.set()

    def restore(self) -> None:
        """Restore the default handlers."""
        self._handled.set()
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
        elif now > self._arrived_at + DUPLICATE:
            self._restore()
            os.kill(os.getpid(), number)

    def _start_thread(self, seconds: float) -> None:
        """Start the thread that calls ``late``.

        It reads signals from a pipe, because Python calls ``_note`` only after a collective has returned.
        """
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        if (other := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(other)  # the script uses it, for example for asyncio
            os.close(reading)
            os.close(writing)
            return
        self._wakeup_fd, self._handled = writing, threading.Event()
        numbers, handled = tuple(self._ours), self._handled

        def wait() -> None:
            while (number := os.read(reading, 1)) and number[0] not in numbers:
                pass
            if number and not handled.wait(seconds):
                self._late(number[0], seconds)
            while number and os.read(reading, 64):  # until the other end is closed
                pass
            os.close(reading)

        threading.Thread(target=wait, name="cpulaunch-late", daemon=True).start()


def _restore(signals: Signals | None) -> None:
    if signals:
        signals._restore()
