"""The findings at the top of a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.telemetry import write_job

from cpulaunch.report import figures
from cpulaunch.report.findings import findings, in_words
from cpulaunch.report.numbers import Numbers
from cpulaunch.report.page import render
from cpulaunch.report.read import read_job


def job(
    tmp_path: Path, *rows: dict[str, Any], waiting: float = 0.0, reading: dict[int, float] | None = None
) -> Path:
    """Write 20 steps of 0.1 s of 4 ranks.  In each, all ranks but rank 1 wait for ``waiting`` seconds."""
    place = write_job(tmp_path, steps=0)
    lines = [
        {
            "rank": rank, "step": n, "time": n / 10, "seconds": 0.1, "communication": 0.001 + waiting,
            "waiting": 0.001 + (waiting if rank != 1 else 0), "input": (reading or {}).get(rank, 0.0),
        }
        for n in range(1, 21)
        for rank in range(4)
    ]  # fmt: skip
    processes = [{"time": 1.0 + n, "rss": 1 << 30, **row} for n, row in enumerate(rows)]
    text = "".join(json.dumps(row) + "\n" for row in [{"schema": 1}, *lines, *processes])
    (place / "telemetry.jsonl").write_text(text)
    return place


def texts(place: Path) -> list[str]:
    return [each.text for each in findings(Numbers(read_job(place)))]


def test_disabled_telemetry_is_reported(tmp_path: Path) -> None:
    place = write_job(tmp_path, steps=0)
    plan = json.loads((place / "plan.json").read_text())
    plan["settings"].append({"key": "watch.telemetry", "value": "none", "origin": "--telemetry"})
    (place / "plan.json").write_text(json.dumps(plan))
    numbers = Numbers(read_job(place))
    assert "telemetry" in in_words(numbers)
    assert "switched off (--telemetry none)" in in_words(numbers)
    assert "switched off (--telemetry none)" in render([numbers.job], "", "test")


def test_a_slow_rank_is_named_with_its_delay(tmp_path: Path) -> None:
    assert texts(job(tmp_path, waiting=0.08)) == [
        "80 % of the others' time waiting for slower ranks: rank 1 on node0 takes 99 ms a step without waiting, the others 19 ms"
    ]


def test_a_slow_rank_is_compared_with_the_other_ranks(tmp_path: Path) -> None:
    """With two ranks, the rank itself would be half of a median over all ranks."""
    place = job(tmp_path, waiting=0.08)
    rows = [json.loads(line) for line in (place / "telemetry.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(row) + "\n" for row in rows if row.get("rank", 0) < 2)
    (place / "telemetry.jsonl").write_text(text)
    numbers = Numbers(read_job(place))
    assert {name: text for name, text, _ in numbers.key_figures()}["slowest"] == "rank 1 (+421 %)"  # 99 ÷ 19
    assert "rank 1 on node0 takes 99 ms a step without waiting, the others 19 ms" in findings(numbers)[0].text
    assert "Rank 1 takes 421 % longer than the others." in render([numbers.job], "", "test")


def test_without_a_slowest_rank_none_is_named(tmp_path: Path) -> None:
    """Each rank waits only in every fourth step, and equally long."""
    place = job(tmp_path)
    rows = [json.loads(line) for line in (place / "telemetry.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        row["waiting"] = 0.041 if row["step"] % 4 == row["rank"] else 0.001
    (place / "telemetry.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (text,) = texts(place)
    assert (
        text
        == "10 % waiting for slower ranks: not always the same rank (batches of unequal length, or busy hosts)"
    )


def test_the_slowest_rank_is_not_blamed_for_single_long_steps(tmp_path: Path) -> None:
    """Three of 20 steps are long, and the other ranks wait for them.

    In the other steps, one rank is a little slower.
    """
    place = job(tmp_path)
    rows = [json.loads(line) for line in (place / "telemetry.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        row["waiting"] = 0.01 if row["rank"] != 1 else 0.001
        if row["step"] > 17:
            row.update(seconds=0.8, waiting=0.75 if row["rank"] else 0.0)
    (place / "telemetry.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "not always the same rank" in texts(place)[0]


def test_a_slow_rank_that_waits_for_its_input(tmp_path: Path) -> None:
    assert texts(job(tmp_path, waiting=0.08, reading={1: 0.07})) == [
        "80 % of the others' time waiting for slower ranks: rank 1 on node0 waits 70 ms a step for its input, the others 0 ms"
    ]


def test_a_loader_that_is_slow_on_all_ranks(tmp_path: Path) -> None:
    (first,) = texts(job(tmp_path, reading=dict.fromkeys(range(4), 0.06)))
    assert first.startswith("60 % waiting for input: more workers of the DataLoader")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("throttled", "40 % of the time of rank 1 on node0 is lost to the CPU quota of its control group"),
        ("far_memory", "40 % of the memory of rank 1 on node0 is on other NUMA nodes than its cores"),
    ],
)
def test_outside_influences_on_a_rank_come_first(tmp_path: Path, name: str, says: str) -> None:
    """The influence comes first, although its consequences take more time."""
    rows = [{"rank": 1, name: 0.3}, {"rank": 1, name: 0.5}, {"rank": 3, name: 0.3}, {"rank": 0, name: 0.01}]
    first, second = texts(job(tmp_path, *rows, waiting=0.08))
    assert first.startswith(says)
    assert first.endswith("; the same of 1 other rank")
    assert second.startswith("80 % of the others' time waiting")


def test_in_a_normal_job_nothing_stands_out(tmp_path: Path) -> None:
    place = job(tmp_path, {"rank": 0, "throttled": 0.02, "far_memory": 0.1})
    assert texts(place) == []
    assert "What stands out" not in render([read_job(place)], "", "test")
    assert "\nwhat stands out\n  nothing: most time is spent on computation" in in_words(
        Numbers(read_job(place))
    )
    (place / "telemetry.jsonl").unlink()
    assert "stands out" not in in_words(Numbers(read_job(place)))


def test_counters_continue_after_a_restart(tmp_path: Path) -> None:
    """After the restart, another program counts from 0."""
    rows = [
        {"rank": 0, "cycles": 1000, "instructions": 1500, "amx_busy": 100},
        {"rank": 0, "cycles": 2000, "instructions": 3500, "amx_busy": 300},
        {"rank": 0, "cycles": 500, "instructions": 500, "amx_busy": 200},
        {"rank": 1, "cycles": 1500, "instructions": 4000, "amx_busy": float("nan")},
        {"rank": 1, "cycles": "many"},
    ]
    figures = {name: text for name, text, _ in Numbers(read_job(job(tmp_path, *rows))).key_figures()}
    assert figures["instructions per cycle"] == "2.00"
    assert figures["cycles with AMX busy"] == "12 %"


def test_figures_from_counters_need_counters(tmp_path: Path) -> None:
    figures = {name for name, *_ in Numbers(read_job(job(tmp_path, {"rank": 0}))).key_figures()}
    assert not {"instructions per cycle", "cycles with AMX busy"} & figures


def of_instances(place: Path) -> Numbers:
    """Return the same job as instances 5 to 8."""
    plan = json.loads((place / "plan.json").read_text())
    (place / "plan.json").write_text(json.dumps({**plan, "instances": {"first": 5}}))
    return Numbers(read_job(place))


def test_figures_and_findings_name_instances(tmp_path: Path) -> None:
    held_back = [{"rank": 1, "throttled": 0.4}, {"rank": 3, "throttled": 0.3}]
    numbers = of_instances(job(tmp_path, *held_back, reading=dict.fromkeys(range(4), 0.02)))
    for spec in (figures.heat_map(numbers, figures.TimeAxis(10.0)), figures.shares(numbers)):
        assert spec
        assert [*dict.fromkeys(value["r"] for value in spec["data"]["values"])] == ["5", "6", "7", "8"]
    first, *_ = [each.text for each in findings(numbers)]
    assert first.startswith("40 % of the time of instance 6 on node0 is lost")
    assert first.endswith("; the same of 1 other instance")
    assert "4 instances" in in_words(of_instances(job(tmp_path / "other")))
