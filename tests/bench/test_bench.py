"""`cpulaunch bench` with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import Run, needs_two_cores


@pytest.mark.slow
@needs_two_cores
def test_each_operation_is_measured_by_both_backends(cpulaunch: Run, tmp_path: Path) -> None:
    done = cpulaunch("bench", "-n", "2", "--sizes", "4K,64K", "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = {(row["operation"], row["bytes"]): row for row in document["rows"]}
    operations = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
    assert list(rows) == [(operation, size) for operation in operations for size in (4096, 65536)]
    assert all(row[key] > 0 for row in rows.values() for key in ("ccl_us", "gloo_us", "limit_us"))
    assert document["link_bytes_per_second"] is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "4X"], "'4X' is not a size from 64 to 1G"),
        (["--sizes", "2G"], "'2G' is not a size from 64 to 1G"),
        (["--sizes", "64M-4K"], "a range goes from the smaller to the larger"),
        (["--operations", "allreduce"], "unknown operation 'allreduce'; did you mean 'all_reduce'?"),
        (["--backend", "gloo"], "bench always measures both"),
        (["-n", "1"], "bench needs at least two ranks"),
        (["--instances", "2"], "instances do not communicate"),
        (["train.py"], "unexpected argument 'train.py'"),
    ],
)
def test_bad_input_is_refused(cpulaunch: Run, options: list[str], message: str) -> None:
    done = cpulaunch("bench", *options)
    assert done.returncode == 2
    assert message in done.stderr
