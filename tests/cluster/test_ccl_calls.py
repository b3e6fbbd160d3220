"""Errors on several hosts name ranks of a ccl group that are late or call a different operation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.faults import Cluster
from support.jobs import box, outcome
from support.marks import repeat
from support.ranks import OVER_LIBFABRIC, hosts_of, started_ranks

from cluster.conftest import Run
from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

# A rank waits until all others have been notified of the failure.  Rank 0, which has the store, ends last.
DIFFER = """\
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("ccl", timeout=timedelta(seconds=float(sys.argv[1])))
rank, size = dist.get_rank(), dist.get_world_size()
store, x = dist.distributed_c10d._get_default_store(), torch.ones(1000)
every, parts = torch.ones(size * 1000), [torch.ones(1000) for _ in range(size)]
dist.all_reduce(x)

def wait(key, ranks):
    store.wait([f"{key}/{each}" for each in ranks], timedelta(seconds=50))

def leave(state):
    print(state, flush=True)
    store.set(f"over/{rank}", "")
    wait("over", range(size))
    store.set(f"left/{rank}", "")
    if rank == 0:
        wait("left", range(size))
    os._exit(7)

try:
    exec(sys.argv[3] if rank == int(sys.argv[2]) else sys.argv[4])
except dist.DistBackendError as error:
    leave(error)
leave("no error")
"""


# Two ranks of the group call gather with themselves as root, so neither sends anything.
GATHERS = """\
import os, torch, torch.distributed as dist
dist.init_process_group("ccl")
rank, x = dist.get_rank(), torch.ones(40)
group = dist.new_group([0, 2, 3])
if rank == 1:
    dist.recv(x, 3)
    os._exit(0)
root = 2 if rank == 2 else 0
parts = [torch.ones(40) for _ in range(3)] if rank == root else None
try:
    dist.gather(x, parts, root, group=group)
    dist.send(x, 1)
    os._exit(0)
except dist.DistBackendError as error:
    print(error, flush=True)
    os._exit(7)
"""

# Each rank broadcasts with itself as root.
ROOTS = """\
import torch, torch.distributed as dist
dist.init_process_group("ccl")
rank, size = dist.get_rank(), dist.get_world_size()
store, x = dist.distributed_c10d._get_default_store(), torch.ones(1000)
dist.all_reduce(x)
dist.broadcast(x, rank)
store.set(f"sent/{rank}", "")
store.wait([f"sent/{each}" for each in range(size)])
"""


def differing(
    cluster: Cluster, layout: str, timeout: float, odd: int, its_call: str, call: str, **variables: str
) -> list[str]:
    """The errors of all ranks if rank ``odd`` calls ``its_call`` and the others call ``call``."""
    argv = [sys.executable, "-c", DIFFER, str(timeout), str(odd), its_call, call]
    with started_ranks(cluster, hosts_of(layout), argv, limit=60, **variables) as processes:
        said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [7] * len(processes), said
    return [out for out, _ in said]


@pytest.mark.parametrize(
    ("layout", "late", "call", "variables"),
    [
        ("2x2", 3, "dist.all_reduce(x)", {}),
        repeat("2x2", 3, "dist.all_to_all_single(torch.ones(4), torch.ones(4))", {}),
        repeat("2x2", 2, "dist.reduce_scatter(x, parts)", {}),
        repeat("3x1", 2, "dist.all_reduce(torch.ones(1_000_000))", {}),
        repeat("4x1", 0, "dist.broadcast(x, 0)", {}),
        repeat("4x1", 2, "dist.all_gather(parts, x)", {}),
        repeat("4x2", 5, "dist.reduce(torch.ones(1_000_000), 0)", OVER_LIBFABRIC),
        repeat("3+1", 3, "dist.all_reduce(x)", OVER_LIBFABRIC),
        repeat("3x2", 3, "dist.broadcast(torch.ones(10_000_000), 0)", OVER_LIBFABRIC),  # more than fits into the sockets' buffers
        repeat("4x1", 2, "dist.all_gather(parts, x)", OVER_LIBFABRIC),
    ],
    ids=[
        "all_reduce", "all_to_all", "reduce_scatter", "in pieces", "broadcast", "all_gather",
        "libfabric, in pieces", "libfabric, alone on its host", "libfabric, broadcast", "libfabric alone",
    ],
)  # fmt: skip
def test_all_waiting_ranks_name_a_late_rank_on_another_host(
    cluster: Cluster, layout: str, late: int, call: str, variables: dict[str, str]
) -> None:
    """A rank also names the late rank if it waits only for another rank that waits for the late rank.

    tests/ccl/test_failures.py tests a late rank over oneCCL.
    """
    until_all_have_raised = "wait('over', {*range(size)} - {rank})"
    said = differing(cluster, layout, 4, late, until_all_have_raised, call, **variables)
    del said[late]
    named = f"timeout of 4 s: rank {late} on {hosts_of(layout)[late]} did not call the operation"
    assert all(named in text for text in said), said


def test_ranks_are_not_reported_as_late_if_data_is_lost(cluster: Cluster) -> None:
    """Data is lost between two hosts, but both can still reach the host with the store."""
    call = "print('up', flush=True); sys.stdin.readline(); dist.all_reduce(x)"
    argv = [sys.executable, "-c", DIFFER, "6", "-1", "", call]
    with started_ranks(cluster, hosts_of("3x1"), argv, limit=60, stdin=subprocess.PIPE) as processes:
        assert [process.stdout.readline() for process in processes if process.stdout] == ["up\n"] * 3
        with cluster.parted("node1", "node2"):
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            said = [process.communicate()[0] for process in processes]
    assert any("have called the operation, but not all data arrived in time" in text for text in said), said
    assert not any("did not call the operation" in text for text in said), said


@pytest.mark.parametrize(
    ("layout", "odd_call", "call", "named"),
    [
        ("2x1", "dist.all_reduce(torch.ones(2000))", "dist.all_reduce(x)",
         ("all_reduce (sum) of 8000 bytes float32", "all_reduce (sum) of 4000 bytes float32")),
        repeat("2x2", "dist.group.WORLD._get_backend(x.device).average_compressed(x).wait()", "dist.all_reduce(x)",
         ("all_reduce (average) of 4000 bytes float32, sent between hosts as bfloat16", "all_reduce (sum)")),
        repeat("2x2", "dist.broadcast(x, 3)", "dist.broadcast(x, 0)", ("from rank 3", "from rank 0")),
    ],
    ids=["size", "wire", "root"],
)  # fmt: skip
def test_a_differing_rank_on_another_host_is_named_with_both_calls(
    cluster: Cluster, layout: str, odd_call: str, call: str, named: tuple[str, str]
) -> None:
    odd = len(hosts_of(layout)) - 1
    said = [text for text in differing(cluster, layout, 30, odd, odd_call, call) if text != "no error\n"]
    assert said  # the root of a broadcast may see no error, because it needs no data
    assert all(f"rank {odd}" in text and all(one in text for one in named) for text in said), said


def test_a_job_with_two_roots_fails_although_its_program_exits_with_0(
    cluster: Cluster, cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ROOTS)
    two = cluster.hostfile(tmp_path / "two-nodes", ["node0", "node1"])
    done = cpulaunch("run", "-f", two, "-ppn", "1", "--backend", "ccl", "train.py")
    title, lines = box(done.stderr)
    assert (done.returncode, outcome(tmp_path)["kind"]) == (1, "error"), done.stderr
    assert re.fullmatch(r"ranks make different calls, and rank [01] on node[01] failed first", title)
    assert re.search(
        r"calls broadcast of 4000 bytes from rank ([01]), this rank broadcast of", " ".join(lines)
    )


@pytest.mark.repeats
def test_two_roots_of_a_gather_are_an_error_although_no_rank_sends(cluster: Cluster) -> None:
    with started_ranks(cluster, hosts_of("4x1"), [sys.executable, "-c", GATHERS], limit=90) as processes:
        said = [process.communicate(timeout=45)[0] for process in processes]
    assert [process.returncode for process in processes] == [7, 0, 7, 0], said
    told = "rank {} on node{} calls gather to rank {}, this rank gather to rank {}"
    assert told.format(2, 2, 2, 0) in said[0] or "rank 2 on node2 failed" in said[0], said
    assert told.format(0, 0, 0, 2) in said[2] or "rank 0 on node0 failed" in said[2], said
    assert any("calls gather to rank" in text for text in said), said
