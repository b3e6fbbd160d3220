"""What sinks for the disk have in common: a thread that writes, so that a hanging disk blocks nobody."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cpulaunch.supervise.telemetry.rows import Row


class ThreadedSink:
    """A sink (``supervise.telemetry.rows.Sink``) that calls `write` in a thread, which the first rows start.

    While more than ``limit`` rows wait, further rows are dropped.  After an OSError of `write`, all are.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._changed = threading.Condition()
        self._waiting: list[Row] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def write(self, rows: list[Row], closed: bool) -> None:
        """Write the rows that have come since the last call; the last call has ``closed`` True."""
        raise NotImplementedError

    def lost(self, error: OSError | None) -> None:
        """Handle the loss of rows: by an error of `write`, or None if too many wait."""
        raise NotImplementedError

    def rows(self, rows: Sequence[Row]) -> None:
        """Queue rows to be written."""
        with self._changed:
            if keeps_up := len(self._waiting) <= self._limit:
                self._waiting += rows
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if not keeps_up:
            self.lost(None)

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
        closed = failed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                rows, self._waiting = self._waiting, []
                closed = self._closed
            try:
                if not failed:
                    self.write(rows, closed)
            except OSError as e:
                failed = True
                self.lost(e)
