"""A launcher that is killed before any of its agents, which are on other hosts, has connected."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, bounded, clean_environment, mpiexec_after
from support.faults import Cluster
from support.marks import repeat
from support.namespaces import until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mpi", ["intel", repeat("mpich"), repeat("openmpi")])
def test_a_launcher_killed_before_agents_connect_leaves_no_process(
    mpi: str, cluster: Cluster, tmp_path: Path
) -> None:
    """The launcher is stopped after it has started mpiexec, so the agents get no answer."""
    options = mpiexec_after(tmp_path, "kill -STOP $PPID; exec", mpi)
    (tmp_path / "sleep.py").write_text(
        "import os, time; open('started-' + os.environ['RANK'], 'w'); time.sleep(300)"
    )
    hosts = ("--hosts", "node0,node1", "--grace-period", "0.5")
    argv = [sys.executable, "-m", "cpulaunch", "run", *hosts, *options, "sleep.py"]
    with bounded(cluster.start("login", argv, directory=tmp_path, env=clean_environment())) as launcher:
        started = [tmp_path / "started-0", tmp_path / "started-1"]
        until(lambda: all(path.exists() for path in started), "both ranks to start", TIMEOUT)
        cluster.signal(launcher, signal.SIGKILL)
        launcher.send_signal(signal.SIGCONT)  # nsenter was stopped, too
        launcher.wait(TIMEOUT)
        until(lambda: not cluster.processes(), "all processes to end", TIMEOUT)
