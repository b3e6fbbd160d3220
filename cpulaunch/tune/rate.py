"""Computes the rate of a trial from the rows of its telemetry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

WARM_UP = 5
"""First steps of each rank, which are ignored: they allocate memory, compile, and count FLOPs."""

MIN_ROWS = 5
"""Minimum number of rows of each rank to compute a rate."""

CONFIDENCE = 2.0
"""Half the width of a confidence interval, in standard errors: about 95 %."""

BETWEEN_RUNS = 0.015
"""Typical difference between runs with equal settings, as a fraction of the rate."""


class Rate(NamedTuple):
    """The throughput of all ranks together, per second.

    ``unit``: ``samples``, or ``steps`` of ranks if the batch size is unknown.  ``spread``: half the width of
    the 95 % confidence interval, as a fraction of ``per_second``.  ``least`` and ``most``: the range in which
    the rate of another run is expected.
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

    def joined(self, other: Rate) -> Rate:
        """Return the rate of two runs.  If they differ by more than their spreads, so does the result."""
        mean = (self.per_second + other.per_second) / 2
        within = (self.spread + other.spread) / 2 / sqrt(2)
        between = abs(self.per_second - other.per_second) / 2 / mean
        return Rate(mean, max(within, between), self.unit)


class Meter:
    """Collects the rows of a trial's telemetry."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[float, float, float]]] = {}  # seconds, steps, samples

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of ``telemetry.jsonl``; rows without a step are ignored."""
        for row in rows:
            if "step" in row and "seconds" in row and row["step"] - row.get("steps", 1) >= WARM_UP:
                values = row["seconds"], float(row.get("steps", 1)), float(row.get("samples", 0))
                self._rows.setdefault(row["rank"], []).append(values)

    def rate(self, ranks: int) -> Rate | None:
        """Return the rate of a job with this number of ranks; None until each rank has `MIN_ROWS` rows."""
        if len(self._rows) < ranks or any(len(rows) < MIN_ROWS for rows in self._rows.values()):
            return None
        unit = "samples" if all(sum(row[2] for row in rows) for rows in self._rows.values()) else "steps"
        rates = [_mean(rows, 2 if unit == "samples" else 1) for rows in self._rows.values()]
        total = sum(mean for mean, _ in rates)
        # The ranks wait for each other, so their errors are correlated: add them.
        return Rate(total, CONFIDENCE * sum(error for _, error in rates) / total, unit)

    @property
    def seconds(self) -> float:
        """The shortest time for which a rank was measured."""
        return min((sum(row[0] for row in rows) for rows in self._rows.values()), default=0.0)


def _mean(rows: list[tuple[float, float, float]], amount: int) -> tuple[float, float]:
    """Return the mean amount per second, and its standard error."""
    mean = sum(row[amount] for row in rows) / sum(row[0] for row in rows)
    seconds = [row[0] / row[1] for row in rows]
    return mean, mean * stdev(seconds) / fmean(seconds) / sqrt(len(seconds))
