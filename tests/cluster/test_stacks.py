"""``cpulaunch stacks`` for a job on four hosts, run on the launcher's host and on another one."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import TIMEOUT, bounded, clean_environment
from support.faults import Cluster

from cluster.conftest import Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed"),
]

PROGRAM = """\
import os, pathlib, time
def until_told():
    while not pathlib.Path("go").exists(): time.sleep(1)
def load_batch():
    while not pathlib.Path("go").exists(): time.sleep(1)
print("ready", os.getpid(), flush=True)
load_batch() if os.environ["RANK"] == "5" else until_told()
"""


@contextlib.contextmanager
def job(
    cluster: Cluster, four: Path, directory: Path
) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """A job of eight ranks whose launcher is on the host login, and the pids of the ranks."""
    (directory / "program.py").write_text(PROGRAM)
    argv = [sys.executable, "-m", "cpulaunch", "run", "-f", str(four), "-ppn", "2", "--oversubscribe"]
    env = clean_environment(XDG_STATE_HOME=str(directory / "state"), XDG_RUNTIME_DIR="")
    launcher = cluster.start("login", [*argv, "--tee", "all", "program.py"], directory=directory, env=env)
    with bounded(launcher, 2 * TIMEOUT):
        assert launcher.stdout
        words = [launcher.stdout.readline().split() for _ in range(8)]
        try:
            yield launcher, {int(rank.strip("[]")): int(pid) for rank, _, pid in words}
            (directory / "go").touch()
            assert launcher.wait(TIMEOUT) == 0
        finally:
            (directory / "go").touch()


def test_stacks_of_four_hosts_require_the_jobs_token(
    cluster: Cluster, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_RUNTIME_DIR": ""}
    with job(cluster, four, tmp_path) as (_, pids):
        cluster.run("node1", ["kill", "-STOP", str(pids[2])])
        try:
            # Only the launcher's host has the list of its jobs.  Other hosts only see the job's directory.
            away = {"XDG_STATE_HOME": str(tmp_path / "another")}
            for on, where, home in (("login", [], {}), ("node3", ["runs"], away), ("node3", [], away)):
                done = cpulaunch("stacks", *where, on=on, **{**state, **home})
                assert done.returncode == 0, done.stderr
                assert "[5] on node2: load_batch at program.py:5\n" in done.stdout
                assert "[0-4,6-7] until_told at program.py:3\n" in done.stdout
                assert "[2] on node1: stopped (SIGSTOP)\n" in done.stdout
        finally:
            cluster.run("node1", ["kill", "-CONT", str(pids[2])])
        (first, *_) = cpulaunch("jobs", "runs", on="node3", **state).stdout.splitlines()
        assert "running · 4 hosts, 8 ranks" in first
        (control,) = tmp_path.glob("runs/*/control.json")
        (tmp_path / "forged").mkdir()
        said = {**json.loads(control.read_text()), "token": "0" * 64}
        (tmp_path / "forged/control.json").write_text(json.dumps(said))
        done = cpulaunch("stacks", "forged", on="node3", **state)
        assert (done.returncode, done.stdout) == (3, "")
        assert "does not answer: it closed the connection" in done.stderr
