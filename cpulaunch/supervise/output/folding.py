"""The ranks' lines on the screen, each with its rank; equal ones of many are one: ``[0-15] warning …``."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import groupby

from cpulaunch.metric_line import WORD, is_metric
from cpulaunch.model.cores import CoreSet

Line = tuple[int, bytes]
"""A stream (1, 2), and a line of it without its end."""


MAX_SHOWN_LINE = 1 << 16
"""Bytes after which the screen gets a line's beginning, though its end isn't there yet."""

MOMENT = 0.1
"""Seconds in which equal lines of several ranks are taken for one."""

MANY = 3
"""Equal lines of at least so many ranks are taken for one; on a terminal, those of two are."""

MAX_FOLDED = 1 << 18
"""Bytes that wait for their like at most."""

BAR_PERIOD = 1.0
"""Seconds between two looks at a line that is drawn over and over, as progress bars are."""

Shown = Iterator[tuple[int, bytes]]
"""A stream, 1 or 2, and what to write to it."""

LONGEST_FIGURE = 1 << 10
"""Bytes after which what begins as a figure is none."""

_FIGURE = WORD.encode()


class Fold:
    """Lines that wait for their like, in the order in which they have come."""

    def __init__(self) -> None:
        self.size = 0
        self.many = dict.fromkeys((1, 2), MANY)
        """Stream → how many ranks' equal lines are taken for one."""
        self._queues: dict[int, deque[tuple[int, Line]]] = {}
        self._count = 0

    def add(self, rank: int, line: Line) -> None:
        self._queues.setdefault(rank, deque()).append((self._count, line))
        self._count += 1
        self.size += len(line[1]) + 1

    def take(self) -> Iterator[tuple[Line, CoreSet]]:
        """All lines, each with the ranks that have it next at the same time; none waits any more."""
        queues, self._queues, self.size = self._queues, {}, 0
        heads: dict[Line, list[int]] = {}
        order: list[tuple[int, Line]] = []  # by when the first rank's has come

        def advance(rank: int) -> None:
            if queues[rank]:
                number, line = queues[rank].popleft()
                heads.setdefault(line, []).append(rank)
                heapq.heappush(order, (number, line))

        for rank in queues:
            advance(rank)
        while order:
            _, line = heapq.heappop(order)
            if ranks := heads.pop(line, None):
                yield line, CoreSet(ranks)
                for rank in ranks:
                    advance(rank)


class WithoutFigures:
    """A stream without the lines that state figures, of which the job's end shows what they come to."""

    def __init__(self) -> None:
        self._held = b""  # what may be the beginning of one

    def feed(self, data: bytes) -> bytes:
        data, self._held = self._held + data, b""
        shown, start = [], 0
        while (at := data.find(_FIGURE, start)) >= 0:
            end = data.find(b"\n", at)
            if end < 0 and len(data) - at <= LONGEST_FIGURE:
                shown.append(data[start:at])
                self._held = data[at:]
                return b"".join(shown)
            after = len(data) if end < 0 else end + 1
            shown.append(data[start : at if end >= 0 and is_metric(data[at:end]) else after])
            start = after
        part = next((n for n in range(len(_FIGURE) - 1, 0, -1) if data.endswith(_FIGURE[:n], start)), 0)
        cut = len(data) - part
        self._held = data[cut:]
        return b"".join([*shown, data[start:cut]])

    def finish(self) -> bytes:
        """What was held back, and is no figure."""
        held, self._held = self._held, b""
        return b"" if is_metric(held) else held


class ShownLines:
    """Cuts output, which comes in pieces, into lines with the prefix ``[rank] ``.

    Of a line that is drawn over and over, the last state is a line.
    """

    def __init__(self) -> None:
        self._rest: dict[tuple[int, int], bytes] = {}
        self._bars: dict[tuple[int, int], float] = {}

    def feed(self, rank: int, stream: int, data: bytes, now: float) -> list[bytes]:
        """The lines that have ended with ``data``, or begin to be shown anyway."""
        *lines, rest = (self._rest.get((rank, stream), b"") + data).split(b"\n")
        if len(rest) > MAX_SHOWN_LINE:
            lines, rest = [*lines, rest], b""
        elif b"\r" in rest[:-1] and now > self._bars.get((rank, stream), 0) + BAR_PERIOD:
            self._bars[rank, stream] = now
            lines.append(rest)
        self._rest[rank, stream] = rest
        return [_last_state(line) for line in lines]

    def rest(self, rank: int, stream: int) -> bytes:
        """What has no line end yet."""
        return self._rest.get((rank, stream), b"")

    def forget(self, rank: int, stream: int) -> None:
        """Drop what has no line end yet."""
        self._rest.pop((rank, stream), None)

    def unfinished(self) -> list[tuple[int, int]]:
        """The ranks and streams with something that has no line end yet."""
        return sorted(where for where, rest in self._rest.items() if rest)

    def finish(self, rank: int, stream: int) -> list[bytes]:
        """What has no line end, and won't get one."""
        rest = self._rest.pop((rank, stream), b"")
        return [_last_state(rest)] if rest else []


def prefixed(rank: int, lines: list[bytes]) -> bytes:
    """Lines of one rank, as they are shown where nothing is folded."""
    return b"".join(b"[%d] %s\n" % (rank, line) for line in lines)


def folded(fold: Fold) -> Shown:
    """All that waits in ``fold``, with equal lines of many ranks as one."""
    for stream, group in groupby(fold.take(), key=lambda taken: taken[0][0]):
        yield (
            stream,
            b"".join(
                b"[%s] %s\n" % (str(prefix).encode(), line)
                for (_, line), ranks in group
                for prefix in ([ranks] if len(ranks) >= fold.many[stream] else ranks)
            ),
        )


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
