"""A base class of sinks that write to the disk in a thread, so that a hanging disk blocks nothing else."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cpulaunch.supervise.telemetry.rows import Row


class ThreadedSink:
    """A sink (``supervise.telemetry.rows.Sink``) that calls `write` in a thread.  The first rows start it.

    While more than ``limit`` rows wait, further rows are dropped.  After an OSError in `write`, all rows are
    dropped.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._changed = threading.Condition()
        self._waiting: list[Row] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def write(self, rows: list[Row], closed: bool) -> None:
        """Write the rows since the last call.  ``closed``: this is the last call."""
        raise NotImplementedError

    def handle_loss(self, error: OSError | None) -> None:
        """Handle the loss of rows.  ``error`` was raised by `write`; None if too many rows wait."""
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
            self.handle_loss(None)

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
                self.handle_loss(e)
