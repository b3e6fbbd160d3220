"""Traces of a job on four hosts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.command import clean_environment
from support.faults import Cluster
from support.traced import PROGRAM, check, events_of

pytestmark = pytest.mark.slow


AHEAD = ["unshare", "--time", "--monotonic", "5000", "sh", "-c", '"$@" & wait $!', "sh"]
"""Runs a command with a different clock, as if on another machine."""


def test_a_trace_of_four_hosts_is_consistent(cluster: Cluster, built, four: Path, tmp_path: Path) -> None:
    """The trace has a row for each rank, and no collective ends before the last rank has begun it."""
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "cpulaunch", "run", "-f", str(four), "-ppn", "1", "--oversubscribe"]
    options = ["--backend", "ccl", "--profile", "4-5", "train.py", "ccl", "", "7"]
    env = clean_environment(TMPDIR=str(tmp_path), LC_ALL="C.UTF-8")
    done = cluster.run("login", [*AHEAD, *command, *options], timeout=60, directory=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    (trace,) = tmp_path.glob("runs/*/trace.json.gz")
    events = events_of(trace)
    uncertain = re.search(r"clocks of hosts agree to ([\d.]+) ms", trace.with_name("trace.txt").read_text())
    assert uncertain
    assert check(events, 4, backend="ccl", late=float(uncertain[1]) + 0.5) == ["step 4", "step 5"]
    rows = sorted(event["args"]["name"] for event in events if event["name"] == "process_name")
    assert [re.sub(r" · .*", "", row) for row in rows] == [f"rank {rank}" for rank in range(4)]
    assert len({row.partition(" · ")[2] for row in rows}) == 4
    assert not [*tmp_path.glob("cpulaunch-trace-*")]
