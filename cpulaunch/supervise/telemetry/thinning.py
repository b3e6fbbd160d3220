"""Fewer rows of telemetry: several steps of a rank become one row, with their means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cpulaunch.supervise.telemetry.rows import Row

MEANS = ("seconds", "communication", "waiting", "input", "bytes", "samples", "tokens")


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
    steps = [row.get("steps", 1) for row in rows]
    result = dict(rows[-1])
    result["steps"] = sum(steps)
    for name in MEANS:
        known = [(row[name], count) for row, count in zip(rows, steps, strict=True) if name in row]
        if known:
            total = sum(value * count for value, count in known)
            # What a row doesn't have of samples and tokens is none of them.
            of = sum(steps) if name in ("samples", "tokens") else sum(count for _, count in known)
            result[name] = round(total / of, 7)
    for name in ("loss", "flops"):
        if last := next((row[name] for row in reversed(rows) if name in row), None):
            result[name] = last
    return result
