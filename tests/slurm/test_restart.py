"""A job whose node Slurm sets down continues without it, in an allocation that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import bounded, clean_environment
from support.slurm import Queue

from slurm.conftest import CPULAUNCH

pytestmark = pytest.mark.slow

WAITS = """\
import os, time
attempt = os.environ["CPULAUNCH_RESTART_COUNT"]
print("attempt", attempt, "of", os.environ["WORLD_SIZE"], flush=True)
if attempt == "0":
    time.sleep(300)
"""
OPTIONS = ("--launcher", "slurm", "--tee", "all", "-ppn", "1", "--grace-period", "1")


def test_a_job_continues_without_a_node_that_was_marked_down(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    restarts = ("--nnodes", "3:4", "--max-restarts", "1", "--set", "watch.restart_always=true")
    argv = [*CPULAUNCH, "run", *OPTIONS, *restarts, "waits.py"]
    with queue.allocation("--nodes=4", "--no-kill") as allocation:
        environ = clean_environment(LC_ALL="C.UTF-8", **allocation)
        with bounded(queue.start("login", argv, directory=tmp_path, env=environ)) as job:
            assert job.stdout
            first = [job.stdout.readline() for _ in range(4)]
            with queue.down("node2"):
                out, error = job.communicate()
    assert all(line.endswith("attempt 0 of 4\n") for line in first), error
    assert job.returncode == 0, error
    assert sorted(out.splitlines()) == [f"[{rank}] attempt 1 of 3" for rank in range(3)]
    assert "restart 1 of 1: 3 ranks on node[0-1,3], without node2" in error
