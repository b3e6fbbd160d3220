"""Thin rows of telemetry by merging several steps of a rank into one row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cpulaunch.supervise.telemetry.rows import Row
from cpulaunch.telemetry import added


class Thinning:
    """Merges each rank's rows of steps into one row per ``stride`` steps.

    A merged row ends with a step whose number is a multiple of ``stride``.  For rows about processes, every
    ``stride``-th of each rank is kept.  Rows of other kinds are kept.
    """

    def __init__(self, stride: int = 1) -> None:
        self.stride = stride
        self._waiting: dict[int, list[Row]] = {}
        self._skipped: dict[int, int] = {}

    def take(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Add rows, and yield those that are kept or complete."""
        for row in rows:
            if self.stride == 1:
                yield row
            elif "step" in row:
                waiting = self._waiting.setdefault(row["rank"], [])
                waiting.append(row)
                if row["step"] % self.stride == 0:
                    yield merged(self._waiting.pop(row["rank"]))
            elif "rss" in row:
                skipped = self._skipped.get(row["rank"], self.stride - 1)
                self._skipped[row["rank"]] = (skipped + 1) % self.stride
                if skipped + 1 == self.stride:
                    yield row
            else:
                yield row

    def after(self, before: Thinning) -> Thinning:
        """Take over the incomplete rows of ``before``, which had a smaller stride.  Returns self."""
        for rank, rows in before._waiting.items():
            self._waiting.setdefault(rank, []).extend(rows)
        return self

    def rest(self) -> Iterator[Row]:
        """Yield the incomplete rows, merged."""
        waiting, self._waiting = self._waiting, {}
        for rows in waiting.values():
            yield merged(rows)


def merged(rows: list[Row]) -> Row:
    """Merge consecutive rows of a rank's steps into one row."""
    if len(rows) == 1:
        return rows[0]
    return {**rows[-1], "steps": sum(row.get("steps", 1) for row in rows), **added(rows)}
