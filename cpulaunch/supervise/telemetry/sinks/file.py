"""Write ``telemetry.jsonl`` in a thread of its own, so that a hanging disk blocks nobody.

docs/telemetry.md describes the format.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.telemetry.rows import Row
from cpulaunch.supervise.telemetry.sinks.writer import RowsThread
from cpulaunch.supervise.telemetry.thinning import Thinning

NAME = "telemetry.jsonl"

HEAD = 512
"""Bytes of the first line, padded with spaces, so that it can be rewritten in place."""

MAX_ROWS = 1_000_000
"""Maximum rows of the file.  Once they are reached, the file is thinned to half the rows of steps."""

MAX_WAITING = 200_000
"""Rows that may wait for the disk; further rows are dropped."""


class TelemetryFile:
    """A sink (``supervise.telemetry.rows.Sink``) that writes rows to a file.  The first rows create the file.

    ``facts`` are fixed values of the first line.  ``warn`` is called with a line, once, if rows are lost.
    """

    def __init__(
        self, directory: JobDirectory, facts: Row, warn: Callable[[str], None], max_rows: int = MAX_ROWS
    ) -> None:
        self._directory, self._facts, self._warn = directory, dict(facts), warn
        self._max_rows = max_rows
        self._warned = self._failed = False
        self._thread = RowsThread("telemetry", self._take, MAX_WAITING)
        # Used by the thread only.
        self._file: BinaryIO | None = None
        self._count = 0
        self._thinning = Thinning()
        self._head: Row = {}

    def rows(self, rows: Sequence[Row]) -> None:
        """Queue rows to be written."""
        if not self._thread.put(rows):
            self._warn_once("takes too little: telemetry.jsonl is not complete")

    def close(self, patience: float) -> bool:
        """Wait until all is written.  Returns False if that takes more than ``patience`` seconds."""
        return self._thread.close(patience)

    def _warn_once(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"{self._directory.path} {what}")

    # ---- in the thread

    def _take(self, rows: list[Row], closed: bool) -> None:
        try:
            if not self._failed:
                self._write(self._thinning.take(rows))
                if closed:
                    self._write(self._thinning.rest())
        except OSError as e:
            self._failed = True
            self._warn_once(f"can't be written: {e.strerror}; the job goes on without telemetry.jsonl")
        finally:
            if self._file is not None and (closed or self._failed):
                with contextlib.suppress(OSError):  # the disk may be full
                    self._file.close()
                self._file = None

    def _write(self, rows: Iterable[Row]) -> None:
        file = self._file or self._make()
        lines = []
        for row in rows:
            if "schema" in row:
                self._head |= {key: value for key, value in row.items() if value is not None}
                os.pwrite(file.fileno(), self._first_line(), 0)
            else:
                lines.append(_line(row))
        file.write(b"".join(lines))
        file.flush()
        self._count += len(lines)
        before = self._count + 1
        while self._max_rows <= self._count < before:  # repeat until rows can't be thinned further
            before = self._count
            self._thin()

    def _make(self) -> BinaryIO:
        fd = self._directory.open(NAME, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._file = os.fdopen(fd, "wb")
        self._file.write(self._first_line())
        self._file.flush()
        return self._file

    def _first_line(self) -> bytes:
        head = {"schema": 1, "peak_flops": None, "flops_per_step": None, "precision": None}
        return json.dumps({**head, **self._head, **self._facts}).encode().ljust(HEAD - 1) + b"\n"

    def _thin(self) -> None:
        """Rewrite the file with a doubled stride, so that half the rows of steps remain."""
        file = self._file
        assert file is not None
        thinning = Thinning(2 * self._thinning.stride)
        count = 0
        with self._directory.whole(NAME) as fewer:
            fewer.write(self._first_line())
            for part in _parts(thinning.take(_rows_of(file))):
                _write_all(fewer, b"".join(map(_line, part)))
                count += len(part)
        file.close()
        self._thinning = thinning.after(self._thinning)
        self._count = count
        fd = self._directory.open(NAME, os.O_RDWR)
        self._file = os.fdopen(fd, "wb")
        self._file.seek(0, os.SEEK_END)


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _rows_of(file: BinaryIO) -> Iterator[Row]:
    """Yield the rows after the first line."""
    with open(os.dup(file.fileno()), "rb") as lines:
        lines.seek(0)
        for number, line in enumerate(lines):
            if number:
                yield json.loads(line)


def _parts(rows: Iterator[Row]) -> Iterator[list[Row]]:
    part = []
    for row in rows:
        part.append(row)
        if len(part) == 1000:
            yield part
            part = []
            time.sleep(0)  # let the launcher's event loop run
    yield part
