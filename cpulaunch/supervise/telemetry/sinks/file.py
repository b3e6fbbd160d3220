"""Write ``telemetry.jsonl``, whose format is described in docs/telemetry.md."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import BinaryIO

from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.telemetry.rows import Row
from cpulaunch.supervise.telemetry.sinks.threaded import ThreadedSink
from cpulaunch.telemetry import added

NAME = "telemetry.jsonl"

HEAD = 512
"""Bytes of the first line, padded with spaces, so that it can be rewritten in place."""

MAX_ROWS = 1_000_000
"""Maximum rows of the file.  When it is reached, `Thinning` halves the rows about steps."""

MAX_WAITING = 200_000
"""Maximum rows that wait for the disk; further rows are dropped."""


class TelemetryFile(ThreadedSink):
    """Writes rows to a file.  The first rows create the file.

    ``facts`` are fixed values of the first line.  ``warn`` is called once with a line if rows are lost.
    """

    def __init__(
        self, directory: JobDirectory, facts: Row, warn: Callable[[str], None], max_rows: int = MAX_ROWS
    ) -> None:
        super().__init__("telemetry", MAX_WAITING)
        self._directory, self._facts, self._warn = directory, dict(facts), warn
        self._max_rows = max_rows
        self._warned = False
        # Used by the thread only.
        self._file: BinaryIO | None = None
        self._count = 0
        self._thinning = Thinning()
        self._head: Row = {}

    def handle_loss(self, error: OSError | None) -> None:
        if error:
            self._close()
        if not self._warned:
            self._warned = True
            slow = "is too slow; telemetry.jsonl is not complete"
            broken = error and f"can't be written: {error.strerror}; the job goes on without telemetry.jsonl"
            self._warn(f"{self._directory.path} {broken or slow}")

    # ---- in the thread

    def write(self, rows: list[Row], closed: bool) -> None:
        self._write(self._thinning.take(rows))
        if closed:
            self._write(self._thinning.rest())
            self._close()

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

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                self._file.close()
            self._file = None

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
        """Rewrite the file with a doubled stride, so that half of the rows about steps remain."""
        file = self._file
        assert file is not None
        thinning = Thinning(2 * self._thinning.stride)
        count = 0
        with self._directory.whole(NAME) as fewer:
            fewer.write(self._first_line())
            rows = thinning.take(_rows_of(file))
            while part := list(islice(rows, 1000)):
                _write_all(fewer, b"".join(map(_line, part)))
                count += len(part)
                time.sleep(0)  # let the launcher's event loop run
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


class Thinning:
    """Merges each rank's rows about steps into one row per ``stride`` steps.

    The last step of a merged row is a multiple of ``stride``.  Of each rank's rows about its process, every
    ``stride``-th is kept.  Other rows are kept.
    """

    def __init__(self, stride: int = 1) -> None:
        self.stride = stride
        self._waiting: dict[int, list[Row]] = {}
        self._skipped: dict[int, int] = {}

    def take(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Add rows, and yield complete merged rows and rows that are kept."""
        for row in rows:
            if self.stride == 1:
                yield row
            elif "step" in row:
                waiting = self._waiting.setdefault(row["rank"], [])
                waiting.append(row)
                if row["step"] % self.stride == 0:
                    yield merge_rows(self._waiting.pop(row["rank"]))
            elif "rss" in row:
                skipped = self._skipped.get(row["rank"], self.stride - 1)
                self._skipped[row["rank"]] = (skipped + 1) % self.stride
                if skipped + 1 == self.stride:
                    yield row
            else:
                yield row

    def after(self, before: Thinning) -> Thinning:
        """Take over the incomplete rows of ``before``, which had a smaller stride.  Returns self."""
        for rank, rows in before._waiting.items():
            self._waiting.setdefault(rank, []).extend(rows)
        return self

    def rest(self) -> Iterator[Row]:
        """Yield the incomplete rows, merged."""
        waiting, self._waiting = self._waiting, {}
        for rows in waiting.values():
            yield merge_rows(rows)


def merge_rows(rows: list[Row]) -> Row:
    """Merge consecutive rows about a rank's steps into one row."""
    if len(rows) == 1:
        return rows[0]
    return {**rows[-1], "steps": sum(row.get("steps", 1) for row in rows), **added(rows)}
