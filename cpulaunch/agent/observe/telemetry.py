"""What the launcher is told of the program: its steps, from its ledger, and what its process uses."""

from __future__ import annotations

import math
import mmap
import time
from typing import Any

from cpulaunch import ledger
from cpulaunch.agent.observe.usage import Usage
from cpulaunch.messages import StepRow, Steps
from cpulaunch.telemetry import OF_STEPS, SUMS, Field

MAX_ROWS = 32
"""Rows of a message at most."""

PER_SECOND = 100
"""Messages of all agents of a job in a second, which a launcher of a thousand ranks can read."""

SETTLED = 0.5
"""Seconds after its end in which a step may still get a loss."""

PROCESS_PERIOD = 5.0
"""Seconds between two looks at the process, at least."""

_LATEST = tuple(field.name for field in OF_STEPS if not field.is_sum)


class Telemetry:
    """Reads one program's ledger, and looks at its process.  ``due`` is when, on the monotonic clock."""

    def __init__(self, kept: mmap.mmap | None, usage: Usage, world_size: int, beats: float) -> None:
        """``beats`` is the time between two heartbeats, in seconds."""
        self._kept, self._usage = kept, usage
        self._period = min(max(1.0, world_size / PER_SECOND), beats)
        self.due = time.monotonic() + self._period
        self._process_due = self.due + PROCESS_PERIOD - self._period
        self._before: ledger.Step | None = None  # the last one that was told
        self._latest: dict[str, float] = {}  # of steps after that one, what isn't added
        self._peak_told = False

    def look(self, now: float) -> Steps | None:
        """What is new, if anything is."""
        self.due = now + self._period
        process: dict[str, Any] = {}
        if now >= self._process_due:
            self._process_due = now + max(PROCESS_PERIOD, self._period)
            process = self._usage.row(now)
        return self._message(now, self._rows(int((now - SETTLED) * 1e9)), process)

    def last(self) -> Steps | None:
        """What is left to tell of a program that has ended."""
        now = time.monotonic()
        return self._message(now, self._rows(None), {})

    def _message(self, now: float, rows: list[list[Any]], process: dict[str, Any]) -> Steps | None:
        peak, precision = None, ""
        if self._kept and not self._peak_told:
            _, peak, precision = ledger.recorded(self._kept)
            self._peak_told = peak > 0
        if not (rows or process or (peak and self._peak_told)):
            return None
        return Steps(now, rows, process, peak or None, precision)

    def _rows(self, until: int | None) -> list[list[Any]]:
        """The steps since the last time that ended before ``until``; all of them where it is None.

        Where there are many, only every second, fourth, … has a row, by its number, so that all ranks have
        rows for the same steps.  The others count in it: what the ledger has are sums.
        """
        kept = self._kept
        if not kept or not (last := ledger.recorded(kept).last):
            return []
        if self._before is None:
            self._before = ledger.step(kept, 0) or ledger.Step(0, 0, dict.fromkeys(SUMS, 0))
        stride = 1
        while last - self._before.number > MAX_ROWS * stride:
            stride *= 2
        rows = []
        # The oldest one may be written anew at any moment.
        for number in range(max(self._before.number + 1, last - ledger.STEPS + 2), last + 1):
            step = ledger.step(kept, number)
            if step is None:
                continue
            if until is not None and step.ended_at > until:
                break
            self._latest |= {name: step.fields[name] for name in _LATEST if math.isfinite(step.fields[name])}
            if number % stride == 0 or (until is None and number == last):
                rows.append(self._row(self._before, step))
                self._before, self._latest = step, {}
        return rows

    def _row(self, before: ledger.Step, step: ledger.Step) -> list[Any]:
        fields = [self._value(field, before, step) for field in OF_STEPS]
        return list(StepRow(step.number, step.number - before.number, step.ended_at / 1e9, fields))

    def _value(self, field: Field, before: ledger.Step, step: ledger.Step) -> float | None:
        if not field.is_sum:
            return self._latest.get(field.name)
        more = step.fields[field.name] - before.fields[field.name]
        return more / 1e9 if field.unit == "s" else more
