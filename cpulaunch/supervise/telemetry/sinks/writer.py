"""A thread that writes rows of telemetry, so that a hanging disk blocks nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cpulaunch.supervise.telemetry.rows import Row

Write = Callable[[list[Row], bool], None]


class RowsThread:
    """Calls ``write(rows, closed)`` with the rows put since the last call; the last call has ``closed`` True.

    The first rows start the thread.  While more than ``limit`` rows wait, further rows are dropped.
    """

    def __init__(self, name: str, write: Write, limit: int) -> None:
        self._name, self._write, self._limit = name, write, limit
        self._changed = threading.Condition()
        self._waiting: list[Row] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, rows: Sequence[Row]) -> bool:
        """Queue rows.  Returns False if they are dropped."""
        with self._changed:
            if len(self._waiting) > self._limit:
                return False
            self._waiting += rows
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def close(self, patience: float) -> bool:
        """Wait until all is written.  Returns False if that takes more than ``patience`` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _work(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                rows, self._waiting = self._waiting, []
                closed = self._closed
            self._write(rows, closed)
