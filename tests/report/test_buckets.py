"""Telemetry in buckets: sums stay correct for rows of any kind and number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.telemetry import write_job

from cpulaunch.report.buckets import BUCKETS, Buckets
from cpulaunch.report.numbers import Numbers
from cpulaunch.report.read import Job, read_job, read_telemetry
from cpulaunch.supervise.output.record import State


def test_widening_buckets_loses_nothing() -> None:
    buckets = Buckets()
    for number in range(1, 2001):
        rows = [
            {
                "rank": rank,
                "step": number,
                "time": number / 2,
                "seconds": 0.5,
                "tokens": 10,
                "waiting": 0.1 * rank,
            }
            for rank in range(3)
        ]
        buckets.add([*rows, {"rank": 2, "time": number / 2, "rss": 1000 + number}])
    assert buckets.width * BUCKETS >= 1000 > buckets.width * BUCKETS / 2
    assert buckets.of["steps"].sum(axis=1).tolist() == [2000, 2000, 2000]
    assert buckets.of["tokens"].sum() == 60000
    assert np.allclose(buckets.of["waiting"].sum(axis=1), [0, 200, 400])
    assert buckets.of["rss"].max(axis=1).tolist() == [0, 0, 3000]


def test_rows_of_several_steps_count_as_several() -> None:
    one, other = Buckets(), Buckets()
    one.add([{"rank": 0, "step": n, "time": 2.0, "seconds": 0.5, "samples": 4} for n in (1, 2, 3, 4)])
    other.add([{"rank": 0, "step": 4, "steps": 4, "time": 2.0, "seconds": 2.0, "samples": 16}])
    for name in ("steps", "seconds", "samples"):
        assert one.of[name].tolist() == other.of[name].tolist()


def test_rows_without_a_time_follow_each_other() -> None:
    """The public interface allows such minimal rows."""
    buckets = Buckets()
    buckets.add([{"rank": 0, "step": n, "seconds": 0.25} for n in (1, 2, 3)])
    assert np.flatnonzero(buckets.of["steps"][0]).tolist() == [16, 32, 48]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[1]",
        '{"rank": -1, "step": 1, "time": 1, "seconds": 1}',
        '{"rank": 99999999, "step": 1, "time": 1, "seconds": 1}',
        '{"rank": 0, "step": 1, "seconds": "x"}',
        '{"rank": true, "time": 1, "rss": 5}',
        '{"rank": 0, "time": 1, "rss": null}',
        '{"rank": 0, "step": 1, "time": 1, "seconds": NaN}',
        '{"rank": 0, "step": 1e400, "time": 1e400, "seconds": 1e400}',
        '{"something": "new"}',
    ],
)
def test_invalid_rows_are_skipped(tmp_path: Path, line: str) -> None:
    good = json.dumps({"rank": 0, "step": 1, "time": 1.0, "seconds": 0.5})
    (path := tmp_path / "telemetry.jsonl").write_text(f'{{"schema": 1}}   \n{good}\n{line}\n{good}\n')
    head, buckets = read_telemetry(path)
    assert head["schema"] == 1
    assert (buckets.ranks, buckets.of["steps"].sum(), buckets.of["seconds"].sum()) == (1, 2, 1.0)


def test_buckets_have_the_numbers_of_the_rows(tmp_path: Path) -> None:
    numbers = Numbers(read_job(write_job(tmp_path, ranks=4, steps=300, slow=2)))
    figures = {name: number for name, _, number in numbers.key_figures()}
    assert figures["steps"] == 300
    assert figures["a step"] == pytest.approx(0.086, rel=0.02)
    assert figures["throughput"] == pytest.approx(4 * 4096 / 0.086, rel=0.02)
    assert figures["MFU"] == pytest.approx(3.4e10 / 0.086 / 1.2e12, rel=0.02)
    assert figures["waiting for slower ranks"] == pytest.approx(0.012 / 0.086 * 3 / 4, rel=0.02)
    assert numbers.slowest is not None
    assert numbers.slowest[0] == 2
    assert sum(part.mean() for part in numbers.shares().values()) == pytest.approx(1)


def test_a_job_of_slow_steps_has_curves_without_gaps() -> None:
    """The job's buckets are shorter than a step."""
    buckets = Buckets()
    ends = np.cumsum([1.0 + 0.3 * (number % 3) for number in range(40)])
    buckets.add([{"rank": 0, "step": n, "time": float(end), "seconds": 1.3} for n, end in enumerate(ends)])
    job = Job("job", State.ENDED, None, "", (), (), "", (), {}, buckets, "")
    throughput = Numbers(job).throughput
    assert 15 < len(throughput) < 40
    assert np.isfinite(throughput).all()
