"""How far this rank is, in the header of its ledger."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from cpulaunch import ledger

_STEPS, _PROGRESSED_AT, _LONGEST_GAP = 1, 3, 4  # of the header, as 8 bytes each
_COLLECTIVES = ledger.OTHERS_AT // 8


class Header:
    """The header of a ledger, but for what ``ccl`` writes there.  Threads may share it."""

    def __init__(self, memory: Any) -> None:
        view = memoryview(memory)[: ledger.HEADER_SIZE]
        self._halves, self._numbers = view.cast("I"), view.cast("Q")
        self._halves[0] = ledger.MAGIC
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def expect_steps(self) -> None:
        """There is an optimizer."""
        self._halves[1] |= ledger.HAS_OPTIMIZER

    def add_step(self) -> None:
        """An optimizer has made a step."""
        self._add(_STEPS, 1, time.monotonic_ns())

    def add_collectives(self, count: int, at: int) -> None:
        """Some of other groups than those of ``ccl`` were completed."""
        self._add(_COLLECTIVES, count, at)

    def _add(self, field: int, count: int, at: int) -> None:
        with self._lock:
            numbers = self._numbers
            numbers[field] += count
            if (before := numbers[_PROGRESSED_AT]) >= at:
                return
            if before and at - before > numbers[_LONGEST_GAP]:
                numbers[_LONGEST_GAP] = at - before
            numbers[_PROGRESSED_AT] = at

    def _forget(self) -> None:
        """A forked process is not the rank: what it does goes nowhere."""
        self._lock = threading.Lock()  # as another thread may have held it
        nowhere = memoryview(bytearray(ledger.HEADER_SIZE))
        self._halves, self._numbers = nowhere.cast("I"), nowhere.cast("Q")
