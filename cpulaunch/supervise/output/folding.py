"""Prefix the ranks' lines on the screen, and fold equal lines of many ranks: ``[0-15] warning …``."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import groupby

from cpulaunch.metric_line import WORD, is_metric
from cpulaunch.model.cores import CoreSet

Line = tuple[int, bytes]
"""A stream (1: stdout, 2: stderr), and a line without its line end."""

MAX_SHOWN_LINE = 1 << 16
"""Bytes after which an unfinished line is shown."""

MOMENT = 0.1
"""Seconds within which equal lines of several ranks are folded."""

MANY = 3
"""Minimum number of ranks whose equal lines are folded; on a terminal it is 2."""

MAX_FOLDED = 1 << 18
"""Maximum bytes of lines that wait to be folded."""

BAR_PERIOD = 1.0
"""Minimum seconds between two displayed states of a progress bar or another redrawn line."""

Shown = Iterator[tuple[int, bytes]]
"""A stream (1: stdout, 2: stderr), and the bytes to write to it."""

LONGEST_FIGURE = 1 << 10
"""Maximum bytes of a metric line; a longer line is ordinary output."""

_FIGURE = WORD.encode()


class Fold:
    """Lines that wait to be folded, in order of arrival."""

    def __init__(self) -> None:
        self.size = 0
        self.min_ranks = dict.fromkeys((1, 2), MANY)
        """Stream → minimum number of ranks whose equal lines are folded."""
        self._queues: dict[int, deque[tuple[int, Line]]] = {}
        self._count = 0

    def add(self, rank: int, line: Line) -> None:
        self._queues.setdefault(rank, deque()).append((self._count, line))
        self._count += 1
        self.size += len(line[1]) + 1

    def take(self) -> Iterator[tuple[Line, CoreSet]]:
        """Remove and yield all lines, each with the ranks that printed it as their next line."""
        queues, self._queues, self.size = self._queues, {}, 0
        heads: dict[Line, list[int]] = {}
        order: list[tuple[int, Line]] = []  # a heap by order of arrival

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


class MetricFilter:
    """Removes metric lines from a stream; the launcher summarizes them when the job ends."""

    def __init__(self) -> None:
        self._held = b""  # may be the beginning of a metric line

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
        """Return the bytes that are still held, unless they are a metric line."""
        held, self._held = self._held, b""
        return b"" if is_metric(held) else held


class ShownLines:
    """Cuts output, which arrives in pieces, into lines.

    If a line is redrawn with carriage returns, only its last state is kept.
    """

    def __init__(self) -> None:
        self._rest: dict[tuple[int, int], bytes] = {}
        self._bars: dict[tuple[int, int], float] = {}

    def feed(self, rank: int, stream: int, data: bytes, now: float) -> list[bytes]:
        """Add ``data`` and return the lines to show.

        These are the completed lines, an unfinished line if it is longer than ``MAX_SHOWN_LINE`` bytes, and
        the state of a redrawn line, at most once in ``BAR_PERIOD`` seconds.
        """
        *lines, rest = (self._rest.get((rank, stream), b"") + data).split(b"\n")
        if len(rest) > MAX_SHOWN_LINE:
            lines, rest = [*lines, rest], b""
        elif b"\r" in rest[:-1] and now > self._bars.get((rank, stream), 0) + BAR_PERIOD:
            self._bars[rank, stream] = now
            lines.append(rest)
        self._rest[rank, stream] = rest
        return [_last_state(line) for line in lines]

    def rest(self, rank: int, stream: int) -> bytes:
        return self._rest.get((rank, stream), b"")

    def forget(self, rank: int, stream: int) -> None:
        self._rest.pop((rank, stream), None)

    def unfinished(self) -> list[tuple[int, int]]:
        return sorted(where for where, rest in self._rest.items() if rest)

    def finish(self, rank: int, stream: int) -> list[bytes]:
        """Remove the unfinished line, if any, and return it in a list."""
        rest = self._rest.pop((rank, stream), b"")
        return [_last_state(rest)] if rest else []


def add_prefix(rank: int, lines: list[bytes]) -> bytes:
    """Return lines of one rank with the prefix ``[rank] ``, without folding."""
    return b"".join(b"[%d] %s\n" % (rank, line) for line in lines)


def take_folded(fold: Fold) -> Shown:
    """Remove all lines of ``fold``; yield them with prefixes, and with equal lines of many ranks folded."""
    for stream, group in groupby(fold.take(), key=lambda taken: taken[0][0]):
        yield (
            stream,
            b"".join(
                b"[%s] %s\n" % (str(prefix).encode(), line)
                for (_, line), ranks in group
                for prefix in ([ranks] if len(ranks) >= fold.min_ranks[stream] else ranks)
            ),
        )


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
