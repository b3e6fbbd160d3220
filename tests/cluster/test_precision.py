"""The precision of a job on several hosts: each CPU model is measured on one host."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
import torch

from cluster.conftest import Run
from cpulaunch.discovery.host.rate_cache import RateCache
from cpulaunch.discovery.host.this_host import cpu_here

pytestmark = pytest.mark.slow


@pytest.mark.repeats
def test_one_host_of_each_cpu_model_is_measured(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print(os.environ['CPULAUNCH_PRECISION'])\n")
    # MKL ignores unknown values.  A new value makes sure that there is no earlier measurement.
    limit = {"MKL_ENABLE_INSTRUCTIONS": uuid.uuid4().hex}
    try:
        done = cpulaunch("run", "--hosts", "node1,node2", "-ppn", 1, "script.py", **limit, timeout=180.0)
        assert done.returncode == 0, done.stderr
        lines = done.stderr.splitlines()
        assert [line for line in lines if "measuring" in line] == [
            "cpulaunch: measuring bf16 and fp32 on node1 (once per CPU model, number of threads and torch version)"
        ]
        (planned,) = [line for line in lines if "planned: " in line]
        assert " GFLOP/s)" in planned
        precision = planned.partition("precision ")[2].split()[0]
        assert sorted(done.stdout.splitlines()) == [f"[0] {precision}", f"[1] {precision}"]
    finally:
        cache = RateCache.of(cpu_here(), torch.__version__, {**os.environ, **limit}).file
        for file in (cache, cache.with_suffix(".lock")):
            file.unlink(missing_ok=True)
