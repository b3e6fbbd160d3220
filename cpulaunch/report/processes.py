"""Aggregates rows of ``telemetry.jsonl`` about processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeGuard

COUNTERS = ("cycles", "instructions", "amx_busy")
"""Fields that count up from the start of a program."""

SHARES = ("throttled", "far_memory")
"""Fields that are shares between 0 and 1; they are averaged."""


class Processes:
    """Sums and means of the fields of rows about processes."""

    def __init__(self) -> None:
        self._last: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self._at: dict[int, tuple[float, float]] = {}  # rank → time and CPU seconds of its last row
        self._on_cpu: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # CPU and wall seconds
        self._counted: defaultdict[str, float] = defaultdict(float)
        self._sums: dict[str, defaultdict[int, list[float]]] = {
            name: defaultdict(lambda: [0.0, 0.0]) for name in SHARES
        }

    def add(self, rank: int, row: Mapping[str, Any]) -> None:
        """Add a row; values that are not numbers are skipped."""
        last = self._last[rank]
        for name in COUNTERS:
            if is_number(value := row.get(name)):
                before = last.get(name, 0.0)
                # After a restart, the new program counts from 0.
                self._counted[name] += value - before if value >= before else value
                last[name] = value
        if is_number(at := row.get("time")) and is_number(used := row.get("cpu_seconds")):
            before_at, before_used = self._at.get(rank, (at, used))
            if at > before_at and used >= before_used:  # not the first row of a restarted program
                self._on_cpu[rank][0] += used - before_used
                self._on_cpu[rank][1] += at - before_at
            self._at[rank] = at, used
        for name in SHARES:
            if is_number(value := row.get(name)):
                sums = self._sums[name][rank]
                sums[0] += value
                sums[1] += 1

    def off_cpu(self) -> dict[int, float]:
        """Return rank → a lower bound of the share of time that it was off the CPU.

        The bound is exact for a program with one thread: in others, computing threads hide idle ones.
        """
        return {rank: max(0.0, 1 - used / seconds) for rank, (used, seconds) in self._on_cpu.items()}

    def mean(self, name: str) -> dict[int, float]:
        """Return rank → mean of a share."""
        return {rank: total / count for rank, (total, count) in self._sums[name].items()}

    def per_cycle(self, name: str) -> float | None:
        """Return the sum of a counter per CPU cycle; None if it is unknown."""
        cycles = self._counted.get("cycles")
        return self._counted[name] / cycles if cycles and name in self._counted else None


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is an int or a finite float."""
    return type(value) in (int, float) and abs(value) < 1e300
