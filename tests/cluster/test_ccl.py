"""The ccl process group over several hosts: several ranks on each, and what is noticed when one dies."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import mpi_options
from support.faults import Cluster
from support.ranks import started_ranks

from cluster.conftest import Run
from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

MEET = """\
import os, torch, torch.distributed as dist
dist.init_process_group("ccl")
rank, size = dist.get_rank(), dist.get_world_size()
for elements in (1, 5000, 3_000_000):
    x = torch.full((elements,), float(rank))
    dist.all_reduce(x)
    assert (x == sum(range(size))).all()
every = torch.zeros(size)
dist.all_to_all_single(every, torch.arange(size) + 100.0 * rank)
assert every.tolist() == [100.0 * r + rank for r in range(size)]
ends = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    dist.all_reduce(torch.ones(3), group=ends)
print("shared memory", os.environ["CCL_ATL_SHM"], flush=True)
dist.destroy_process_group()
"""

WAIT = """\
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("ccl", timeout=timedelta(seconds=120))
x = torch.ones(1000)
dist.all_reduce(x)
print("up", flush=True)
try:
    if os.environ["RANK"] == os.environ["IDLE"]:
        time.sleep(100)
    dist.all_reduce(x)
except dist.DistBackendError as error:
    print(error, flush=True)
    os._exit(7)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_several_ranks_on_each_of_four_hosts_meet(
    attempt: int, cluster: Cluster, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    """Eight ranks on few cores, all asking rank 0's store at once, once starved each other for minutes."""
    (script := tmp_path / "meet.py").write_text(MEET)
    options = ["--backend", "ccl", "--threads", "1", "--oversubscribe", "-ppn", "2"]
    done = cpulaunch(
        "run", *mpi_options("intel"), "-f", four, "--tee", "all", *options, script, timeout=110, on="login"
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall("shared memory 1", done.stdout)) == 8


@contextlib.contextmanager
def ranks(cluster: Cluster, hosts: list[str], idle: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks of WAIT, one for each of ``hosts``, started by nobody who would end them; all have met."""
    argv = [sys.executable, "-c", WAIT]
    with started_ranks(cluster, hosts, argv, limit=150, IDLE=idle) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        yield processes


@pytest.mark.parametrize(
    ("hosts", "dead", "noticed"),
    [
        (["node0", "node0", "node1", "node1"], 3, "rank 3 of this group, on this host, has ended"),
        (["node0", "node1"], 1, r"host node1 \(rank 1\) has given no sign of life for 15 s"),
        (["node0", "node1", "node2"], 2, r"host node2 \(rank 2\) has given no sign of life for 15 s"),
        (["node0", "node1"], 0, "store cannot be reached"),
    ],
    ids=["beside another", "alone on its host", "of three hosts", "the one with the store"],
)
def test_a_rank_killed_on_another_host_is_an_error_in_all_others(
    cluster: Cluster, hosts: list[str], dead: int, noticed: str
) -> None:
    with ranks(cluster, hosts, idle=dead) as processes:
        cluster.signal(processes[dead], 9)
        survivors = [process for rank, process in enumerate(processes) if rank != dead]
        # Half of the group's own timeout, so that it isn't this that ends the ranks.
        said = [process.communicate(timeout=60)[0] for process in survivors]
        assert [process.returncode for process in survivors] == [7] * len(survivors), said
        # The last survivor notices; the others hear of it, or of the end of one that has raised before them.
        assert re.search(noticed, said[-1]), said


def test_a_host_that_falls_off_the_network_is_an_error_in_the_others(cluster: Cluster) -> None:
    with ranks(cluster, ["node0", "node1", "node2"], idle=2) as processes, cluster.cut("node2"):
        said = [process.communicate(timeout=60)[0] for process in processes[:2]]
        assert all("host node2 (rank 2) has given no sign of life" in text for text in said), said


def test_the_host_with_the_store_falls_off_the_network(cluster: Cluster) -> None:
    with ranks(cluster, ["node0", "node1", "node2"], idle=0) as processes, cluster.cut("node0"):
        said = [process.communicate(timeout=90)[0] for process in processes[1:]]
        assert all("the group's store" in text or "has given no sign of life" in text for text in said), said
