"""The rate of a trial, from the rows of its telemetry.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

WARM_UP = 5
"""Steps of each rank that are not counted: the first ones allocate memory, compile, and count FLOPs."""

MIN_ROWS = 5
"""Minimum rows of a rank for its rate to be known."""

CONFIDENCE = 2.0
"""Standard errors on each side of a mean: about 95 %."""

BETWEEN_RUNS = 0.015
"""Fraction of a rate by which two runs of the same settings may differ, however exactly each is known."""


class Rate(NamedTuple):
    """The throughput of all ranks together, per second.

    ``unit``: ``samples``, or ``steps`` of ranks if the batches could not be seen.  ``spread``: half the width
    of the 95 % confidence interval, as a fraction of ``per_second``.  ``least`` and ``most`` are the limits
    between which another run may be.
    """

    per_second: float
    spread: float
    unit: str

    @property
    def least(self) -> float:
        return self.per_second * (1 - max(self.spread, BETWEEN_RUNS))

    @property
    def most(self) -> float:
        return self.per_second * (1 + max(self.spread, BETWEEN_RUNS))


class Meter:
    """Collects the rows of one trial's telemetry as they arrive."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[float, float, float]]] = {}  # seconds, steps, samples

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of ``telemetry.jsonl``; rows that are not about steps are ignored."""
        for row in rows:
            if "step" in row and "seconds" in row and row["step"] - row.get("steps", 1) >= WARM_UP:
                values = row["seconds"], float(row.get("steps", 1)), float(row.get("samples", 0))
                self._rows.setdefault(row["rank"], []).append(values)

    def rate(self, ranks: int) -> Rate | None:
        """Return the rate of a job of ``ranks``; None until there are `MIN_ROWS` rows of each."""
        if len(self._rows) < ranks or any(len(rows) < MIN_ROWS for rows in self._rows.values()):
            return None
        unit = "samples" if all(sum(row[2] for row in rows) for rows in self._rows.values()) else "steps"
        rates = [_mean(rows, 2 if unit == "samples" else 1) for rows in self._rows.values()]
        total = sum(mean for mean, _ in rates)
        # The ranks wait for each other, so their errors add up instead of cancelling out.
        return Rate(total, CONFIDENCE * sum(error for _, error in rates) / total, unit)

    @property
    def seconds(self) -> float:
        """Return the shortest time for which a rank was measured."""
        return min((sum(row[0] for row in rows) for rows in self._rows.values()), default=0.0)


def _mean(rows: list[tuple[float, float, float]], amount: int) -> tuple[float, float]:
    """Return the mean amount per second, and its standard error."""
    mean = sum(row[amount] for row in rows) / sum(row[0] for row in rows)
    seconds = [row[0] / row[1] for row in rows]
    return mean, mean * stdev(seconds) / fmean(seconds) / sqrt(len(seconds))
