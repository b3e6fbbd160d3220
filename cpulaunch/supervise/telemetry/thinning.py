"""Fewer rows of telemetry: several steps of a rank become one row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cpulaunch.supervise.telemetry.rows import Row
from cpulaunch.telemetry import added


class Thinning:
    """Lets rows through of which the step's number is a multiple of ``stride``; the others count in them.

    Of the rows about processes, one in ``stride`` of each rank is let through, and all of other kinds.
    """

    def __init__(self, stride: int = 1) -> None:
        self.stride = stride
        self._waiting: dict[int, list[Row]] = {}
        self._skipped: dict[int, int] = {}

    def take(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Those that are let through."""
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
        """This one, with what waits in the one ``before`` it, which let more through."""
        for rank, rows in before._waiting.items():
            self._waiting.setdefault(rank, []).extend(rows)
        return self

    def rest(self) -> Iterator[Row]:
        """What still waits for a step that is let through."""
        waiting, self._waiting = self._waiting, {}
        for rows in waiting.values():
            yield merged(rows)


def merged(rows: list[Row]) -> Row:
    """One row for all steps of several rows of a rank, in their order."""
    if len(rows) == 1:
        return rows[0]
    return {**rows[-1], "steps": sum(row.get("steps", 1) for row in rows), **added(rows)}
