"""Equal lines of many ranks become one: ``[0-15] warning …``."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from cpulaunch.model.cores import CoreSet

Line = tuple[int, bytes]
"""A stream (1, 2), and a line of it without its end."""


class Fold:
    """Lines that wait for their like, in the order in which they have come."""

    def __init__(self) -> None:
        self.size = 0
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
