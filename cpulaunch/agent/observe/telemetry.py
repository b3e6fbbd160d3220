"""Telemetry that the agent sends to the launcher: the program's steps and its resource use."""

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
"""The largest number of rows in a message."""

PER_SECOND = 100
"""The largest number of messages per second from all agents of a job, so that the launcher keeps up."""

SETTLED = 0.5
"""Seconds after the end of a step until its row is made.  The program may record the loss in this time."""

PROCESS_PERIOD = 5.0
"""The shortest time between two rows on the process, in seconds."""

_LATEST = tuple(field.name for field in OF_STEPS if not field.is_sum)


class Telemetry:
    """Reads the ledger and the resource use of one program.

    Call ``look`` when it is ``due``, a time on the monotonic clock.
    """

    def __init__(self, memory: mmap.mmap | None, usage: Usage, world_size: int, beats: float) -> None:
        """``beats`` is the time between two heartbeats in seconds; the period of messages is at most that."""
        self._memory, self._usage = memory, usage
        self._period = min(max(1.0, world_size / PER_SECOND), beats)
        self.due = time.monotonic() + self._period
        self._process_due = self.due + PROCESS_PERIOD - self._period
        self._before: ledger.Step | None = None  # the last step sent
        self._latest: dict[str, float] = {}  # fields that aren't sums, from the steps after _before
        self._peak_is_sent = False

    def look(self, now: float) -> Steps | None:
        """Make the next message, or return None if there is nothing new."""
        self.due = now + self._period
        process: dict[str, Any] = {}
        if now >= self._process_due:
            self._process_due = now + max(PROCESS_PERIOD, self._period)
            process = self._usage.row(now)
        return self._message(now, self._rows(int((now - SETTLED) * 1e9)), process)

    def last(self) -> Steps | None:
        """Make the last message after the program's end, or return None if there is nothing new."""
        now = time.monotonic()
        return self._message(now, self._rows(None), {})

    def _message(self, now: float, rows: list[list[Any]], process: dict[str, Any]) -> Steps | None:
        peak, precision = None, ""
        if self._memory and not self._peak_is_sent:
            _, peak, precision = ledger.recorded(self._memory)
            self._peak_is_sent = peak > 0
        if not (rows or process or (peak and self._peak_is_sent)):
            return None
        return Steps(now, rows, process, peak or None, precision)

    def _rows(self, until: int | None) -> list[list[Any]]:
        """Make rows for the new steps that ended by ``until`` (nanoseconds), or for all new steps if None.

        If there are too many steps, only those whose number is a multiple of 2, 4, … get a row.  Thus all
        ranks have rows for the same steps.  Each row includes the skipped steps before it.
        """
        memory = self._memory
        if not memory or not (last := ledger.recorded(memory).last):
            return []
        if self._before is None:
            self._before = ledger.step(memory, 0) or ledger.Step(0, 0, dict.fromkeys(SUMS, 0))
        stride = 1
        # Limit the stride, so that at least one step of the ledger's older half gets a row.
        while last - self._before.number > MAX_ROWS * stride and stride < ledger.STEPS // 2:
            stride *= 2
        rows = []
        # Skip the oldest step, which the program may overwrite at any moment.
        for number in range(max(self._before.number + 1, last - ledger.STEPS + 2), last + 1):
            step = ledger.step(memory, number)
            if step is None:
                continue
            # Don't wait for the loss of steps in the ledger's older half: they are soon overwritten.
            if until is not None and step.ended_at > until and number > last - ledger.STEPS // 2:
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
