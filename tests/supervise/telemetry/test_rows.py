"""The launcher's file and summary of the ranks' steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.messages import StepRow, Steps
from cpulaunch.supervise.job.rank import Rank
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.telemetry.rows import Row, Telemetry, duration, rounded
from cpulaunch.supervise.telemetry.sinks.file import TelemetryFile, Thinning, merge_rows
from cpulaunch.telemetry import OF_STEPS

PATIENCE = 30.0


def step(number: int, **different: Any) -> StepRow:
    steps = different.pop("steps", 1)
    fields: dict[str, Any] = {
        "seconds": 0.1, "communication": 0.03, "waiting": 0.01, "bytes": 1000.0, "input": 0.002,
        "samples": 8.0, "tokens": 1024.0, **different,
    }  # fmt: skip
    return StepRow(number, steps, 100.0 + number, [fields.get(field.name) for field in OF_STEPS])


def said(*steps: StepRow, process: dict[str, Any] | None = None, peak: float | None = None) -> Steps:
    return Steps(200.0, [list(each) for each in steps], process or {}, peak, "bf16" if peak else "")


def test_rows_have_the_documented_fields() -> None:
    telemetry = Telemetry(2, began=100.0)
    rank = Rank(1, "node1", clock=-50.0)
    rows = telemetry.add_steps(rank, said(step(60, loss=2.5), step(62, steps=2), process={"rss": 5}))
    assert rows == [
        {"rank": 1, "step": 60, "time": 10.0, "seconds": 0.1, "communication": 0.03, "waiting": 0.01,
         "input": 0.002, "bytes": 1000, "loss": 2.5, "samples": 8, "tokens": 1024},
        {"rank": 1, "step": 62, "steps": 2, "time": 12.0, "seconds": 0.1, "communication": 0.03, "waiting": 0.01,
         "input": 0.002, "bytes": 1000, "samples": 8, "tokens": 1024},
        {"rank": 1, "time": 50.0, "rss": 5},
    ]  # fmt: skip


def test_unknown_values_are_left_out() -> None:
    unknown = step(1, communication=None, waiting=None, bytes=None, samples=0.0, tokens=0.0)
    (row,) = Telemetry(1, 0.0).add_steps(Rank(0, "here"), said(unknown))
    assert row == {"rank": 0, "step": 1, "time": 101.0, "seconds": 0.1, "input": 0.002}


def test_steps_of_a_resumed_rank_continue_from_the_checkpoint() -> None:
    (row,) = Telemetry(1, 0.0).add_steps(Rank(0, "here", resumed_from=300), said(step(1)))
    assert row["step"] == 301


def test_the_first_line_has_the_numbers_of_all_ranks() -> None:
    """Ranks that haven't reported yet count like the others."""
    telemetry = Telemetry(4, 0.0)
    first = telemetry.add_steps(Rank(0, "here"), said(step(3, flops=1e9), peak=5e11))
    head = {"schema": 1, "peak_flops": 2 * 10**12, "flops_per_step": 4 * 10**9, "precision": "bf16"}
    assert first[-1] == head
    for number in (1, 2, 3):
        last = telemetry.add_steps(Rank(number, "here"), said(step(3, flops=2e9), peak=4e11))
    assert last[-1]["flops_per_step"] == 7 * 10**9
    assert last[-1]["peak_flops"] == 1_700 * 10**9


def test_the_summary_names_the_rank_that_waits_least() -> None:
    telemetry = Telemetry(3, 0.0)
    assert telemetry.summary() == ""
    for rank, waiting in enumerate((0.02, 0.02, 0.01)):
        telemetry.add_steps(Rank(rank, "here"), said(step(9, waiting=waiting), step(10, waiting=waiting)))
    assert telemetry.summary() == "step 10 · 100 ms · 30,700 tokens/s · slowest: rank 2 (+12 %)"
    telemetry.add_steps(Rank(0, "here"), said(step(11, flops=1e10), peak=1e12))
    assert " · MFU 10 % · " in telemetry.summary()
    telemetry.add_steps(Rank(0, "here"), said(step(12, flops=2e8)))
    assert " · MFU 0.2 % · " in telemetry.summary()


def test_the_summary_is_per_step_if_a_row_has_several() -> None:
    one, several = Telemetry(1, 0.0), Telemetry(1, 0.0)
    one.add_steps(Rank(0, "here"), said(step(8)))
    several.add_steps(Rank(0, "here"), said(step(8, steps=4, seconds=0.4, waiting=0.04, tokens=4096.0)))
    assert one.summary() == several.summary() == "step 8 · 100 ms · 10,200 tokens/s"


def test_the_summary_with_few_known_values() -> None:
    telemetry = Telemetry(1, 0.0)
    telemetry.add_steps(Rank(0, "here"), said(step(1, tokens=0.0)))
    assert telemetry.summary() == "step 1 · 100 ms · 80 samples/s"
    telemetry = Telemetry(1, 0.0)
    telemetry.add_steps(Rank(0, "here"), said(step(1, tokens=0.0, samples=0.0, seconds=2.345)))
    assert telemetry.summary() == "step 1 · 2.35 s"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.000349, "0.35 ms"),
        (0.0084, "8.4 ms"),
        (0.0845, "84 ms"),
        (0.5, "500 ms"),
        (1.2345, "1.23 s"),
        (99, "99 s"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(41_234, "41,200"), (381.4, "381"), (12.34, "12.3"), (0.1234, "0.123"), (999.9, "1,000")],
)
def test_numbers_have_three_significant_digits(number: float, shown: str) -> None:
    assert rounded(number) == shown


# ---- fewer rows


def row(number: int, rank: int = 0, **more: Any) -> Row:
    return {"rank": rank, "step": number, "time": number / 10, "seconds": 0.1, "samples": 8, **more}


def test_merged_rows_have_the_sums_of_their_steps() -> None:
    first = row(2, steps=2, seconds=0.4, samples=16, loss=3.0)
    assert merge_rows([first, row(3, seconds=0.5, loss=2.0), row(4, samples=0)]) == {
        "rank": 0, "step": 4, "steps": 4, "time": 0.4, "seconds": 1.0, "samples": 24, "loss": 2.0,
    }  # fmt: skip


def test_thinning_lets_every_second_step_of_each_rank_through() -> None:
    thinning = Thinning(2)
    rows: list[Row] = [row(number, rank) for number in range(1, 6) for rank in (0, 1)]
    processes: list[Row] = [{"rank": 0, "time": at, "rss": 1} for at in range(4)]
    attempt: Row = {"attempt": 1, "time": 5.0}
    kept = list(thinning.take([*rows, *processes, attempt]))
    assert [(each["rank"], each["step"]) for each in kept if "step" in each] == [
        (0, 2),
        (1, 2),
        (0, 4),
        (1, 4),
    ]
    assert [each["time"] for each in kept if "rss" in each] == [0, 2]
    assert kept[-1] == attempt
    assert [each["step"] for each in thinning.rest()] == [5, 5]


# ---- the file


def lines(directory: Path) -> list[Row]:
    return [json.loads(line) for line in (directory / "telemetry.jsonl").read_text().splitlines()]


def sink(directory: Path, warned: list[str], max_rows: int = 1000) -> TelemetryFile:
    return TelemetryFile(JobDirectory(directory), {"job": "j", "world_size": 1}, warned.append, max_rows)


def test_the_first_line_is_rewritten_in_its_place(tmp_path: Path) -> None:
    file = sink(tmp_path, [])
    file.rows([row(1)])
    file.rows([{"schema": 1, "peak_flops": 10, "flops_per_step": None, "precision": "bf16"}, row(2)])
    file.rows([{"schema": 1, "peak_flops": None, "flops_per_step": 3, "precision": None}])
    assert file.close(PATIENCE)
    head, *rest = lines(tmp_path)
    assert head == {
        "schema": 1, "peak_flops": 10, "flops_per_step": 3, "precision": "bf16", "job": "j", "world_size": 1,
    }  # fmt: skip
    assert rest == [row(1), row(2)]


def test_a_full_file_keeps_every_second_step_and_continues(tmp_path: Path) -> None:
    file = sink(tmp_path, [], max_rows=100)
    for number in range(1, 1001):
        file.rows([row(number, rank) for rank in (0, 1)])
    assert file.close(PATIENCE)
    head, *rest = lines(tmp_path)
    assert head["schema"] == 1
    assert 50 <= len(rest) <= 100
    for rank in (0, 1):
        mine = [each for each in rest if each["rank"] == rank]
        assert sum(each.get("steps", 1) for each in mine) == 1000
        assert mine[-1]["step"] == 1000
        assert sum(each["seconds"] for each in mine) == pytest.approx(100)
    assert not list(tmp_path.glob("*.part"))


def test_an_unwritable_file_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "telemetry.jsonl").mkdir()
    warned: list[str] = []
    file = sink(tmp_path, warned)
    file.rows([row(1)])
    assert file.close(PATIENCE)
    file.rows([row(2)])
    assert len(warned) == 1
    assert "can't be written" in warned[0]


def test_a_job_without_steps_has_no_file(tmp_path: Path) -> None:
    assert sink(tmp_path, []).close(PATIENCE)
    assert not list(tmp_path.iterdir())
