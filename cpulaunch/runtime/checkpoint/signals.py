"""The signals by which a job is told to save and end: SIGTERM, and what batch systems send before that."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Notes the first such signal; the second one does what it would have done without us.

    Signals for which the script has a handler of its own are left to it.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self._ours: list[signal.Signals] = []

    def watch(self) -> None:
        """Note signals from now on.  Only a program's first thread may."""
        if self._ours or threading.current_thread() is not threading.main_thread():
            return
        self._ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._ours:
            signal.signal(number, self._note)

    def forget(self) -> None:
        """Leave signals alone again."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._ours:
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL)
        self._ours = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.arrived:
            self.forget()
            os.kill(os.getpid(), number)
        self.arrived = number
