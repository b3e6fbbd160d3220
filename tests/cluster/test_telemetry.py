"""Telemetry that the launcher gets from ranks on other hosts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from runtime.observe.programs_telemetry import SLOW_RANK, STEPS
from support.marks import repeat

from cluster.conftest import Run
from cpulaunch.ccl.installed import state
from cpulaunch.report.findings import findings
from cpulaunch.report.numbers import Numbers
from cpulaunch.report.read import read_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

PROGRAMS = Path(__file__).parent.parent / "runtime" / "observe" / "programs_telemetry.py"


@pytest.mark.repeats
@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_the_slow_rank_of_four_hosts_waits_least(
    backend: str, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    """All times refer to the same clock, so a step ends at about the same time on all ranks.

    The report names the slow rank first.
    """
    placed = ("-f", four, "-ppn", 1, "--threads", 1, "--oversubscribe")
    done = cpulaunch("run", *placed, "--backend", backend, PROGRAMS, "slow_rank", backend, timeout=120)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("runs/*/telemetry.jsonl")
    _, *rows = (json.loads(line) for line in file.read_text().splitlines())
    (took,) = (json.loads(each.read_text())["seconds"] for each in tmp_path.glob("runs/*/outcome.json"))
    own = {}
    for rank in range(4):
        steps = [row for row in rows if row.get("rank") == rank and "step" in row]
        assert sum(row.get("steps", 1) for row in steps) == steps[-1]["step"] == STEPS
        assert all(0 < one["time"] < other["time"] < took for one, other in pairwise(steps))
        own[rank] = median(row["seconds"] - row["waiting"] for row in steps)
    assert max(own, key=lambda rank: own[rank]) == SLOW_RANK
    assert own.pop(SLOW_RANK) > 0.2 > median(own.values())
    first, *_ = findings(Numbers(read_job(file.parent)))
    assert f"waiting for slower ranks: rank {SLOW_RANK} on node2 takes 2" in first.text
