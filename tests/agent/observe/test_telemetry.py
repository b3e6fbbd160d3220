"""Telemetry that the agent makes from the steps in the ledger."""

from __future__ import annotations

import math
import mmap
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
from support.agents import PlayedLauncher, placement

from cpulaunch import ledger, messages
from cpulaunch.agent.observe.telemetry import MAX_ROWS, SETTLED, Telemetry
from cpulaunch.agent.observe.usage import Usage
from cpulaunch.messages import StepRow
from cpulaunch.model.cores import CoreSet
from cpulaunch.telemetry import OF_STEPS, SUMS

MS = 10**6


class Written:
    """A ledger as ``runtime.observe.telemetry`` writes it, with steps of 10 ms and 2 samples."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, ledger.SIZE)
        self.last = -1
        self.steps(1)

    def steps(self, count: int, loss: float = math.nan) -> None:
        for number in range(self.last + 1, self.last + count + 1):
            each = {"seconds": 10 * MS, "communication": 4 * MS, "waiting": MS, "bytes": 100, "samples": 2}
            fields = {name: number * each.get(name, 0) for name in SUMS} | {"loss": loss, "flops": math.nan}
            values = (fields[field.name] for field in OF_STEPS)
            record = ledger.STEP.pack(number, (1 + 10 * number) * MS, *values)
            at = ledger.FIRST_STEP + number % ledger.STEPS * ledger.STEP.size
            self.memory[at : at + ledger.STEP.size] = record
        self.last += count
        ledger.RECORDED.pack_into(self.memory, ledger.RECORDED_AT, self.last, 0.0, b"")

    def told(self, telemetry: Telemetry) -> list[StepRow]:
        said = telemetry.look((self.last + 1) / 100 + SETTLED)
        return [StepRow(*row) for row in said.rows] if said else []


def telemetry(written: Written) -> Telemetry:
    return Telemetry(written.memory, Usage(os.getpid(), CoreSet([0]), 0.0), 1, math.inf)


def fields(row: StepRow) -> dict[str, float | None]:
    return {field.name: value for field, value in zip(OF_STEPS, row.fields, strict=True)}


def test_each_step_is_sent_once() -> None:
    written = Written()
    reader = telemetry(written)
    assert written.told(reader) == []
    written.steps(2)
    first, second = written.told(reader)
    assert first[:3] == (1, 1, 0.011)
    assert fields(first) == {
        "seconds": 0.01, "communication": 0.004, "waiting": 0.001, "bytes": 100, "input": 0, "samples": 2,
        "tokens": 0, "loss": None, "flops": None,
    }  # fmt: skip
    assert second.number == 2
    assert written.told(reader) == []


def test_steps_with_round_numbers_are_sent_and_all_steps_count() -> None:
    written = Written()
    reader = telemetry(written)
    written.steps(99)
    rows = written.told(reader)
    assert len(rows) <= MAX_ROWS
    assert [row.number for row in rows] == list(range(4, 100, 4))
    assert [row.steps for row in rows] == [4] * len(rows)
    assert {(fields(row)["seconds"], fields(row)["samples"]) for row in rows} == {(0.04, 8)}
    written.steps(1)
    assert [(row.number, row.steps) for row in written.told(reader)] == [(97, 1), (98, 1), (99, 1), (100, 1)]


def test_steps_already_overwritten_in_the_ledger_count_in_the_next_row() -> None:
    written = Written()
    reader = telemetry(written)
    written.steps(5)
    assert written.told(reader)[-1].number == 5
    written.steps(3 * ledger.STEPS)
    rows = written.told(reader)
    assert sum(row.steps for row in rows) == rows[-1].number - 5
    assert rows[0].steps > ledger.STEPS
    assert [fields(row)["seconds"] for row in rows] == pytest.approx([0.01 * row.steps for row in rows])


def test_a_step_waits_a_moment_for_its_loss_but_not_at_the_end() -> None:
    written = Written()
    reader = telemetry(written)
    written.steps(1, loss=2.5)
    assert reader.look(0.02 + SETTLED / 2) is None
    said = reader.last()
    assert said
    assert [fields(StepRow(*row))["loss"] for row in said.rows] == [2.5]
    assert reader.last() is None


def test_steps_that_will_soon_be_overwritten_do_not_wait_for_their_loss() -> None:
    """Otherwise, a program with thousands of steps per second would have no rows."""
    written = Written()
    reader = telemetry(written)
    written.steps(100 * ledger.STEPS + 1)
    said = reader.look(SETTLED)  # all steps in the ledger have ended since then
    assert said is not None
    numbers = [StepRow(*row).number for row in said.rows]
    assert numbers
    assert max(numbers) <= written.last - ledger.STEPS // 2


def test_a_row_of_several_steps_has_their_last_loss() -> None:
    written = Written()
    reader = telemetry(written)
    written.steps(63, loss=3.0)
    written.steps(1)
    rows = written.told(reader)
    assert {fields(row)["loss"] for row in rows} == {3.0}


def test_the_peak_is_sent_once() -> None:
    written = Written()
    reader = telemetry(written)
    ledger.RECORDED.pack_into(written.memory, ledger.RECORDED_AT, 0, 5e11, b"bf16")
    said = reader.look(1)
    assert said
    assert (said.peak, said.precision) == (5e11, "bf16")
    assert reader.look(2) is None


def test_ranks_of_a_big_job_send_telemetry_less_often() -> None:
    periods = []
    for size in (1, 400, 100_000):
        before = time.monotonic()
        periods.append(Telemetry(None, Usage(1, CoreSet([0]), 0.0), size, 10).due - before)
    assert all(one < other for one, other in pairwise(periods))
    assert periods == pytest.approx([1, 4, 10], abs=0.5)


PROGRAM = """
from cpulaunch import ledger
memory = ledger.of_this_process
ledger.PROGRESS.pack_into(memory, 0, ledger.MAGIC, 0, 1, 0, 1, 0, 0)
for number in (0, 1):
    at = ledger.FIRST_STEP + number * ledger.STEP.size
    ledger.STEP.pack_into(memory, at, number, 10**9 * (number + 1), 10**7 * number, *[0] * 6, 0.5, 1e9)
ledger.RECORDED.pack_into(memory, ledger.RECORDED_AT, 1, 0.0, b"")
"""


def test_the_last_steps_are_reported_before_the_programs_end(tmp_path: Path) -> None:
    with PlayedLauncher(placement(tmp_path), PROGRAM) as launcher:
        launcher.welcome()
        said = launcher.next(messages.Steps)
        assert StepRow(*said.rows[-1]) == StepRow(1, 1, 2.0, [0.01, 0, 0, 0, 0, 0, 0, 0.5, 1e9])
        assert launcher.next(messages.Exit).code == 0


def test_nothing_is_sent_without_a_sink(tmp_path: Path) -> None:
    with PlayedLauncher(placement(tmp_path, telemetry=False), PROGRAM) as launcher:
        launcher.welcome()
        kinds = set()
        while not isinstance(message := launcher.hear(), messages.Exit):
            kinds.add(type(message))
        assert messages.Steps not in kinds
