"""Merge the logs of a job's ranks in the order in which they were written."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cpulaunch.model.names import INSTANCE, RANKS, Names
from cpulaunch.supervise.output.folding import MAX_FOLDED, MOMENT, Fold, Shown, ShownLines, take_folded
from cpulaunch.supervise.output.lines import ORDER
from cpulaunch.supervise.output.logs import OPEN_LOGS

AT_ONCE = 1 << 16
"""Maximum bytes per read."""

Wanted = Callable[[int], bool]
"""Whether a rank is to be shown."""


class Piece(NamedTuple):
    """A piece of a rank's output.

    ``seconds`` is the time since the start of the job.  ``rank`` is the instance's number if the job has
    instances.  ``stream`` is 1 for stdout, 2 for stderr, and 0 for a separator of attempts.
    """

    seconds: float
    rank: int
    stream: int
    data: bytes


class MergedLogs:
    """Reader of a job's logs, which can be read while they grow.

    A context manager: its exit closes the files.
    """

    def __init__(self, directory: Path, wanted: Wanted) -> None:
        self._directory, self._wanted = directory, wanted
        self._order: BinaryIO | None = None
        self._logs: dict[int, BinaryIO] = {}  # the least recently read first
        self._read: dict[int, int] = {}  # bytes read of each rank's log
        self._line = b""
        self._next: tuple[float, int, int, int] | None = None  # a piece whose data isn't in the log yet
        self._seconds = 0.0

    def __enter__(self) -> MergedLogs:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._logs.values(), *filter(None, [self._order])):
            file.close()

    def more(self) -> Iterator[Piece]:
        """Yield the new pieces whose order is recorded in ``output.order``."""
        while following := self._next or self._following():
            seconds, rank, stream, size = following
            self._seconds, self._next = seconds, None
            while size > 0 and (data := self._log(rank, min(size, AT_ONCE))):
                size -= len(data)
                if self._wanted(rank):
                    yield Piece(seconds, rank, stream, data)
            if size > 0:
                self._next = (seconds, rank, stream, size)
                return

    def rest(self) -> Iterator[Piece]:
        """Yield the rest of each log, rank by rank, if ``output.order`` is incomplete."""
        self._next = None
        for rank in self._ranks():
            if self._wanted(rank):
                while data := self._log(rank, AT_ONCE):
                    yield Piece(self._seconds, rank, 1, data)

    def _following(self) -> tuple[float, int, int, int] | None:
        """Return seconds, rank, stream and number of bytes of the next piece; None if there is none yet."""
        while line := self._order_line():
            with contextlib.suppress(ValueError):
                seconds, rank, stream, size = line.split()
                return float(seconds), int(rank), int(stream), int(size)
        return None

    def _order_line(self) -> bytes | None:
        if self._order is None:
            try:
                self._order = (self._directory / ORDER).open("rb")
            except OSError:
                return None
        self._line += self._order.readline(AT_ONCE)
        if not self._line.endswith(b"\n") and len(self._line) < AT_ONCE:
            return None  # its end is not written yet
        line, self._line = self._line, b""
        return line

    @cached_property
    def _noun(self) -> str:
        """The noun for the job's programs, rank or instance, according to the names of the logs.

        Not everybody who may read the logs may read the plan.
        """
        return INSTANCE if any(self._directory.glob(f"{INSTANCE}-*.log")) else RANKS.noun

    def _log(self, rank: int, size: int) -> bytes:
        """Return the next bytes of a rank's log, at most ``size``; empty if there are none."""
        file = self._logs.pop(rank, None)
        if file is None:
            if len(self._logs) >= OPEN_LOGS:
                self._logs.pop(next(iter(self._logs))).close()
            try:
                file = (self._directory / Names(self._noun).log(rank)).open("rb", 0)
            except OSError:
                return b""
            file.seek(self._read.get(rank, 0))
        self._logs[rank] = file
        data = file.read(size)
        self._read[rank] = self._read.get(rank, 0) + len(data)
        return data

    def _ranks(self) -> list[int]:
        noun, names = self._noun, []
        with contextlib.suppress(OSError):
            names = os.listdir(self._directory)
        return sorted(
            int(found[1]) for name in names if (found := re.fullmatch(rf"{noun}-(\d{{1,7}})\.log", name))
        )


class Renderer:
    """Turns pieces into lines as the terminal shows them, with prefixes and with equal lines folded."""

    def __init__(self) -> None:
        self._lines, self._fold = ShownLines(), Fold()
        self._since = 0.0
        self._restart = b""

    def feed(self, piece: Piece) -> Shown:
        """Add a piece and yield the lines to show now."""
        if self._fold.size and (piece.seconds > self._since + MOMENT or self._fold.size > MAX_FOLDED):
            yield from self.flush()
        if piece.stream == 0:
            yield from self._attempt(piece)
            return
        if not self._fold.size:
            self._since = piece.seconds
        for line in self._lines.feed(piece.rank, piece.stream, piece.data, piece.seconds):
            self._fold.add(piece.rank, (piece.stream, line))

    def flush(self) -> Shown:
        yield from take_folded(self._fold)

    def finish(self) -> Shown:
        """Yield everything that is left, unfinished lines included."""
        for rank, stream in self._lines.unfinished():
            for line in self._lines.finish(rank, stream):
                self._fold.add(rank, (stream, line))
        yield from self.flush()

    def _attempt(self, piece: Piece) -> Shown:
        """Show a separator of attempts once, although each rank's log has it."""
        if piece.data != self._restart:
            self._restart = piece.data
            yield from self.finish()
            yield 1, piece.data.lstrip(b"\n")
