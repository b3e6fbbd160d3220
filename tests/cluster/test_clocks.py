"""Failures on two hosts with different monotonic clocks, which a time namespace simulates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.command import clean_environment
from support.faults import Cluster
from support.jobs import outcome
from support.marks import repeat

pytestmark = pytest.mark.slow

# Rank 0 stops the launcher, which is on the same host, until both ranks have failed, so that the launcher
# receives both failures at once.
PROGRAM = """
import atexit, os, pathlib, signal, sys, time
rank, first = int(os.environ["RANK"]), int(sys.argv[1])

def wait_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)

def parent(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

if rank == 0:
    launcher = os.getpid()
    while b"-m\\0cpulaunch\\0run" not in pathlib.Path(f"/proc/{launcher}/cmdline").read_bytes():
        launcher = parent(launcher)

def leave():  # runs after the exception was reported
    pathlib.Path(f"failed-{rank}").touch()
    if rank == 0:
        wait_for("failed-1")
        os.kill(launcher, signal.SIGCONT)

atexit.register(leave)
pathlib.Path(f"ready-{rank}").touch()
wait_for(f"ready-{1 - rank}")
if rank == 0:
    os.kill(launcher, signal.SIGSTOP)
    pathlib.Path("stopped").touch()
wait_for("stopped")
if rank != first:
    wait_for(f"failed-{first}")
raise ValueError(f"rank {rank}")
"""


@pytest.mark.parametrize("first", [repeat(0), 1])
def test_the_first_failure_is_named_even_if_the_hosts_clocks_differ(
    first: int, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "cpulaunch", "run", "--hosts", "node0,node1", "program.py", str(first)]
    ahead = ["unshare", "--time", "--monotonic", "5000", "sh", "-c", '"$@" & wait $!', "sh"]
    done = cluster.run("node0", [*ahead, *command], directory=tmp_path, env=clean_environment())
    assert done.returncode == 1
    failure = outcome(tmp_path)["first_failure"]
    assert (failure["rank"], failure["error"]) == (first, f"ValueError: rank {first}"), done.stderr
