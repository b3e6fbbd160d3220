"""What rows of telemetry.jsonl about processes come to, for each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeGuard

COUNTERS = ("cycles", "instructions", "amx_busy")
"""What grows from a program's start to its end."""

SHARES = ("throttled", "far_memory")
"""Parts of 1, of which the mean counts."""


class Processes:
    """Takes rows about processes and forgets them."""

    def __init__(self) -> None:
        self._last: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self._counted: defaultdict[str, float] = defaultdict(float)
        self._sums: dict[str, defaultdict[int, list[float]]] = {
            name: defaultdict(lambda: [0.0, 0.0]) for name in SHARES
        }

    def add(self, rank: int, row: Mapping[str, Any]) -> None:
        """Count a row; what isn't a number is passed over."""
        last = self._last[rank]
        for name in COUNTERS:
            if is_number(value := row.get(name)):
                before = last.get(name, 0.0)
                # After a restart, it is another program that counts from 0.
                self._counted[name] += value - before if value >= before else value
                last[name] = value
        for name in SHARES:
            if is_number(value := row.get(name)):
                sums = self._sums[name][rank]
                sums[0] += value
                sums[1] += 1

    def mean(self, name: str) -> dict[int, float]:
        """A share of each rank that has told it."""
        return {rank: total / count for rank, (total, count) in self._sums[name].items()}

    def per_cycle(self, name: str) -> float | None:
        """Instructions, or cycles with AMX, of all ranks ÷ their cycles; None where neither is known."""
        cycles = self._counted.get("cycles")
        return self._counted[name] / cycles if cycles and name in self._counted else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is one that can be counted with: neither NaN nor infinite."""
    return type(value) in (int, float) and abs(value) < 1e300
