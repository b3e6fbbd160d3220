"""The cluster for all tests in this folder, and commands that run on it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command import clean_environment
from support.faults import Cluster
from support.namespaces import until, why_not

GONE_WITHIN = 5.0
"""Seconds within which processes that a test has ended must be gone."""

HOSTS = ("node0", "node1", "node2", "node3")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def need_cluster() -> None:
    if problem := why_not():
        # If a cluster is required, as in scripts/test.sh, tests must not be skipped.
        (pytest.fail if os.environ.get("CPULAUNCH_TEST_CLUSTER") else pytest.skip)(
            f"no test cluster: {problem}"
        )


@pytest.fixture(scope="session")
def the_cluster() -> Iterator[Cluster]:
    need_cluster()
    with Cluster(("login", *HOSTS)) as cluster:
        yield cluster


@pytest.fixture
def cluster(the_cluster: Cluster) -> Iterator[Cluster]:
    """Four hosts, and a host called login.  A test must leave no process on them."""
    yield the_cluster
    # After a connection ends, its sshd takes a moment to exit.
    with contextlib.suppress(TimeoutError):
        until(lambda: not the_cluster.processes(), "all processes to end", limit=GONE_WITHIN)
    left = the_cluster.processes()
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def cpulaunch(cluster: Cluster, tmp_path: Path) -> Run:
    """A function that runs ``cpulaunch ARGUMENTS`` on the host ``on``, in an empty directory."""

    def run(
        *arguments: object, on: str = "node0", timeout: float = 60.0, cwd: Path = tmp_path, **env: str
    ) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "cpulaunch", *map(str, arguments)]
        return cluster.run(
            on, argv, timeout=timeout, directory=cwd, env=clean_environment(**{"LC_ALL": "C.UTF-8", **env})
        )

    return run


@pytest.fixture
def four(cluster: Cluster, tmp_path: Path) -> Path:
    """A hostfile with the four hosts."""
    return cluster.hostfile(tmp_path / "four-nodes", HOSTS)
