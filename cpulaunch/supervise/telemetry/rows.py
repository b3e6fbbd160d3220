"""Telemetry of the ranks' steps: rows for ``telemetry.jsonl``, and a summary for the status line.

Pure.  docs/telemetry.md describes the rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple, Protocol

from cpulaunch.messages import StepRow, Steps
from cpulaunch.model.names import RANKS, Names
from cpulaunch.supervise.job.rank import Rank
from cpulaunch.telemetry import OF_STEPS

RECENT = 16
"""Number of each rank's latest rows that the summary covers."""

WORTH_SAYING = 0.05
"""The slowest rank is named if its own time exceeds the others' median by this fraction."""

Row = dict[str, Any]
"""A line of telemetry.jsonl."""


class Sink(Protocol):
    """Destination of telemetry rows."""

    def rows(self, rows: Sequence[Row]) -> None:
        """Take new rows.  Must neither block nor change the rows."""

    def close(self, patience: float) -> bool:
        """Write what is left, at the end of the job.

        Returns False if that takes more than ``patience`` seconds.
        """


class Recent(NamedTuple):
    """A rank's latest steps.

    ``step`` is the number of the last step.  ``seconds`` is the median duration of a step, and ``own`` the
    median without waiting for other ranks, or None.  ``samples`` and ``tokens`` are means per step.
    """

    step: int
    seconds: float
    own: float | None
    samples: float
    tokens: float


class Telemetry:
    """Telemetry of one attempt.  ``began`` is the start of the job on the launcher's clock, in seconds."""

    def __init__(self, world_size: int, began: float, names: Names = RANKS) -> None:
        self._size, self._began, self._names = world_size, began, names
        self._rows: dict[int, deque[Row]] = {}
        self._recent: dict[int, Recent] = {}
        self._flops: dict[int, float] = {}
        self._peaks: dict[int, float] = {}
        self._precision: str | None = None
        self._summary: str | None = ""  # None: out of date

    def add_steps(self, rank: Rank, message: Steps) -> list[Row]:
        rows: list[Row] = []
        steps = [StepRow._make(row) for row in message.rows]
        for step in steps:
            rows.append(self._step(rank, step))
            if (flops := rows[-1].get("flops")) is not None:
                self._flops[rank.rank] = flops
        if steps:
            self._remember(rank, steps[-1].number, rows)
        if message.process:
            rows.append({"rank": rank.rank, "time": self._time(rank, message.at), **message.process})
        if message.peak is not None:
            self._peaks[rank.rank], self._precision = message.peak, message.precision
            row = {"peak_flops": round(message.peak), "precision": message.precision}
            rows.append({"rank": rank.rank, "time": self._time(rank, message.at), **row})
        if message.peak is not None or any("flops" in row for row in rows):
            rows.append(self.head())
        return rows

    def head(self) -> Row:
        """Return the current row for the first line.  The job's FLOPs are extrapolated from known ranks."""
        return {
            "schema": 1,
            "peak_flops": self._of_all(self._peaks),
            "flops_per_step": self._of_all(self._flops),
            "precision": self._precision,
        }

    def summary(self) -> str:
        """Return the summary for the status line; empty before the first step.

        For example ``step 1200 · 84 ms · 41,200 tokens/s · MFU 31 % · slowest: rank 5 (+12 %)``.
        """
        if self._summary is None:
            self._summary = self._sum_up()
        return self._summary

    def _step(self, rank: Rank, step: StepRow) -> Row:
        row: Row = {"rank": rank.rank, "step": step.number + (rank.resumed_from or 0)}
        if step.steps > 1:
            row["steps"] = step.steps
        row["time"] = self._time(rank, step.ended_at)
        for field, value in zip(OF_STEPS, step.fields, strict=True):
            if value or (value is not None and not field.where_any):
                row[field.name] = round(value, 7)
        return {name: _whole(value) for name, value in row.items()}

    def _time(self, rank: Rank, at: float) -> float:
        return round(at + rank.clock - self._began, 4)

    def _remember(self, rank: Rank, made: int, new: Sequence[Row]) -> None:
        rank.record_steps(made)
        rows = self._rows.setdefault(rank.rank, deque(maxlen=RECENT))
        rows.extend(new)
        counts = [row.get("steps", 1) for row in rows]
        own = [
            (row["seconds"] - row["waiting"]) / count
            for row, count in zip(rows, counts, strict=True)
            if "waiting" in row
        ]
        self._recent[rank.rank] = Recent(
            step=rows[-1]["step"],
            seconds=median(row["seconds"] / count for row, count in zip(rows, counts, strict=True)),
            own=median(own) if own else None,
            samples=sum(row.get("samples", 0) for row in rows) / sum(counts),
            tokens=sum(row.get("tokens", 0) for row in rows) / sum(counts),
        )
        self._summary = None

    def _of_all(self, known: dict[int, float]) -> int | None:
        return round(fmean(known.values()) * self._size) if known else None

    def _sum_up(self) -> str:
        recent = self._recent.values()
        seconds = median(each.seconds for each in recent)
        parts = [f"step {max(each.step for each in recent)}", duration(seconds)]
        for unit in ("tokens", "samples"):
            if seconds > 0 and (count := sum(getattr(each, unit) for each in recent)):
                parts.append(f"{rounded(count / seconds)} {unit}/s")
                break
        flops, peak = self._of_all(self._flops), self._of_all(self._peaks)
        if flops and peak and seconds > 0:
            mfu = 100 * flops / seconds / peak
            parts.append(f"MFU {mfu:.0f} %" if mfu >= 1 else f"MFU {mfu:.1g} %")
        own = {rank: each.own for rank, each in self._recent.items() if each.own is not None}
        if len(own) > 1:
            slowest = max(own, key=lambda rank: own[rank])
            others = median(value for rank, value in own.items() if rank != slowest)
            if others > 0 and (more := own[slowest] / others - 1) >= WORTH_SAYING:
                parts.append(f"slowest: {self._names.one(slowest)} (+{100 * more:.0f} %)")
        return " · ".join(parts)


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def duration(seconds: float) -> str:
    """Return a duration with two or three digits: ``"0.35 ms"``, ``"84 ms"``, ``"1.25 s"``, ``"73 s"``."""
    if seconds < 1:
        return f"{rounded(1e3 * seconds, 2)} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"
    return f"{rounded(seconds)} s"


def rounded(number: float, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits, and with commas: ``"41,200"``, ``"8.4"``."""
    if number >= 10 ** (digits - 1):
        whole = int(float(f"{number:.{digits - 1}e}"))
        return f"{whole:,}"
    return f"{float(f'{number:.{digits}g}'):g}"
