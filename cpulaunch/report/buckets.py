"""Aggregates a job's telemetry into a few hundred buckets of time per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpulaunch.report.processes import Processes
from cpulaunch.report.processes import is_number as _is_number
from cpulaunch.telemetry import SUMS

BUCKETS = 320
"""Number of buckets.  Their width is doubled when a row is later than the last bucket."""

MAX_RANK = 1 << 16
"""Rows of ranks from this number on are skipped: the file is malformed."""

ADDED = ("steps", *SUMS, "loss", "losses")
"""Fields that are summed over the steps that ended in a bucket.  ``losses`` counts steps with a loss."""

MOST = ("rss",)
"""Fields whose maximum in a bucket is kept: bytes of resident memory."""

Floats = NDArray[np.float64]
Row = Mapping[str, Any]
Placed = tuple[int, float, Row]
"""Rank, seconds since the job's start, and the row."""


class Buckets:
    """Sums and maxima of the fields in ``telemetry.jsonl``.

    ``of[name][rank, bucket]`` is the sum or the maximum of a field in a bucket of ``width`` seconds.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.width = 1 / 64
        self.of: dict[str, Floats] = {name: np.zeros((ranks, BUCKETS)) for name in (*ADDED, *MOST)}
        self.known: set[str] = set()  # fields that rows had
        self.last_step = 0
        self.processes = Processes()
        self._ended: dict[int, float] = {}  # rank → end of its last step, if its rows lack times

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.of["steps"].shape[0])

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows of steps and of processes; other rows and malformed ones are skipped."""
        steps: list[Placed] = []
        memory: list[Placed] = []
        for row in rows:
            rank, timed = row.get("rank"), _is_number(row.get("time"))
            if "step" in row and _is_rank(rank) and _is_number(row.get("seconds")):
                steps.append((row["rank"], self._time(row), row))
            elif "rss" in row and _is_rank(rank) and timed:
                memory.append((row["rank"], row["time"], row))
                self.processes.add(row["rank"], row)
        if steps:
            self._add_steps(*self._placed(steps))
        if memory:
            where, found = self._placed(memory)
            np.maximum.at(self.of["rss"], where, np.nan_to_num(_column(found, "rss")))

    def _time(self, row: Row) -> float:
        """Return the end of a step, in seconds since the job's start.

        If the row has no time, the step is assumed to begin at the end of the rank's previous step.
        """
        if _is_number(row.get("time")):
            return float(row["time"])
        rank = row["rank"]
        self._ended[rank] = self._ended.get(rank, 0.0) + row["seconds"]
        return self._ended[rank]

    def _add_steps(self, where: tuple[NDArray[np.int64], NDArray[np.int64]], rows: list[Row]) -> None:
        steps = np.maximum(np.nan_to_num(_column(rows, "steps"), nan=1.0), 1.0)
        np.add.at(self.of["steps"], where, steps)
        for name in SUMS:
            column = _column(rows, name)
            if not np.isnan(column).all():
                self.known.add(name)
                np.add.at(self.of[name], where, np.nan_to_num(column))
        losses = _column(rows, "loss")
        if (given := np.isfinite(losses)).any():
            self.known.add("loss")
            places = (where[0][given], where[1][given])
            np.add.at(self.of["loss"], places, losses[given])
            np.add.at(self.of["losses"], places, 1.0)
        numbers = _column(rows, "step")
        self.last_step = max(self.last_step, int(np.nan_to_num(numbers).max()))

    def _placed(self, found: list[Placed]) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], list[Row]]:
        """Return the ranks, the buckets and the rows.  Adds buckets for new ranks and later times."""
        ranks = np.array([rank for rank, _, _ in found])
        times = np.clip(np.array([time for _, time, _ in found], dtype=float), 0.0, 1e9)
        if (more := int(ranks.max()) + 1 - self.ranks) > 0:
            self.of = {name: np.pad(each, ((0, more), (0, 0))) for name, each in self.of.items()}
        while times.max() >= self.width * BUCKETS:
            self._widen()
        return (ranks, (times / self.width).astype(np.int64)), [row for _, _, row in found]

    def _widen(self) -> None:
        """Double the width of all buckets."""
        self.width *= 2
        for name, each in self.of.items():
            pairs = each.reshape(self.ranks, BUCKETS // 2, 2)
            halved = pairs.max(axis=2) if name in MOST else pairs.sum(axis=2)
            self.of[name] = np.pad(halved, ((0, 0), (0, BUCKETS // 2)))


def _column(rows: list[Row], name: str) -> Floats:
    """Return a field of all rows, with NaN for missing and invalid values."""
    values = [row.get(name) for row in rows]
    try:
        column = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        column = np.array([value if _is_number(value) else np.nan for value in values], dtype=np.float64)
    return np.where(np.abs(column) < 1e300, column, np.nan)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_RANK
