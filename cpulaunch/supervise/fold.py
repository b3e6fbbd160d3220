"""Equal lines of many ranks become one: ``[0-15] warning …``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from cpulaunch.model.cores import CoreSet

Line = tuple[int, bytes]
"""A stream (1, 2), and a line of it without its end."""


class Fold:
    """Lines that wait for their like.  Each rank's own lines stay in their order."""

    def __init__(self) -> None:
        self.size = 0
        self._queues: dict[int, deque[Line]] = {}

    def add(self, rank: int, line: Line) -> None:
        self._queues.setdefault(rank, deque()).append(line)
        self.size += len(line[1]) + 1

    def take(self) -> Iterator[tuple[Line, CoreSet]]:
        """All lines, each with the ranks that have it next at the same time; none waits any more."""
        queues, self._queues, self.size = self._queues, {}, 0
        heads: dict[Line, list[int]] = {}
        for rank, queue in queues.items():
            heads.setdefault(queue.popleft(), []).append(rank)
        while heads:
            line = next(iter(heads))
            ranks = heads.pop(line)
            yield line, CoreSet(ranks)
            for rank in ranks:
                if queues[rank]:
                    heads.setdefault(queues[rank].popleft(), []).append(rank)
