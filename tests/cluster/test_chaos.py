"""What befalls jobs on four hosts: each event under one MPI here, under all of them by scripts/chaos.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import chaos
from support.command import mpi_options
from support.faults import Cluster
from support.marks import repeat

from cpulaunch.launchers import MPIS

pytestmark = pytest.mark.slow


# The MPIs differ most in these.
EACH = ("raises while the others sleep", "Python missing, no preflight", "Ctrl-C")
# Each is like another one: computing like sleeping, to be killed by one signal like by another.
REPEATS = ("raises while the others compute", "is killed while the others wait (gloo)", "aborts", "SIGHUP")
CASES = [
    (name, mpi)
    for number, name in enumerate(chaos.EVENTS)
    for mpi in (MPIS if name in EACH else (MPIS[number % len(MPIS)],))
]


@pytest.mark.parametrize(
    ("name", "mpi"),
    [repeat(*case) if case[0] in REPEATS else case for case in CASES],
    ids=[f"{name}-{mpi}" for name, mpi in CASES],
)
def test_what_befalls_a_job_is_named_and_leaves_nothing(
    name: str, mpi: str, cluster: Cluster, tmp_path: Path
) -> None:
    rank = CASES.index((name, mpi)) % 4
    result = chaos.run(cluster, tmp_path, mpi_options(mpi), name, rank)
    assert not chaos.problems(chaos.EVENTS[name], rank, result), result.stderr


def test_a_host_that_loses_its_power(tmp_path: Path) -> None:
    """There is no way back for it, so it gets a cluster of its own."""
    with Cluster(("login", *chaos.HOSTS)) as cluster:
        result = chaos.power_off(cluster, tmp_path, mpi_options("intel"), 2)
    assert result.exit_code == 4, result.stderr
    assert "host node2 was lost" in result.stderr
    assert result.outcome["kind"] == "node_lost"
    assert not result.left
