"""The ccl process group on several hosts with several ranks each, and how ranks notice a dead rank."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import mpi_options
from support.faults import Cluster
from support.marks import repeat
from support.ranks import OVER_LIBFABRIC, hosts_of, started_ranks

from cluster.conftest import Run
from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

# The last rank scatters parts.  All ranks but rank 0 end long before rank 0.
OVER_MPI = """
import time, torch, torch.distributed as dist
from cpulaunch.ccl import load
load.PATIENCE = 0.1
dist.init_process_group("ccl")
rank, size = dist.get_rank(), dist.get_world_size()
x, part = torch.full((1000,), rank + 1.0), torch.zeros(2_000_000)
dist.all_reduce(x)
parts = [torch.full_like(part, float(each)) for each in range(size)]
dist.scatter(part, parts if rank == size - 1 else None, src=size - 1)
if rank == 0:
    time.sleep(1)
print("got", x[0].item(), part.mean().item(), flush=True)
"""

# Rank 0 leaves its groups in another order than the others, which only end.
IN_ANY_ORDER = """
import torch, torch.distributed as dist
dist.init_process_group()
groups = [dist.new_group() for _ in range(3)]
for number in range(3):
    dist.all_reduce(torch.ones(3), group=groups[number])
if dist.get_rank() == 0:
    for number in (1, 0, 0):
        dist.destroy_process_group(groups[number])
        del groups[number]
"""

WAIT = """\
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
os.environ.setdefault("CPULAUNCH_HEARTBEAT_TIMEOUT", "15")
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

# Rank 2 sends when the test writes to its stdin, long after rank 1 has ended.
LEAVE = """\
import sys, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("ccl", timeout=timedelta(seconds=50))
rank, x = dist.get_rank(), torch.ones(1000)
dist.all_reduce(x)
if rank == 0:
    print([dist.recv(x, None if sys.argv[1] == "any" else source) for source in (1, 2)])
    sys.exit()
if rank == 2:
    sys.stdin.readline()
dist.send(x, 0)
"""

# The rank LATE calls the operation when the test writes to its stdin.  Ranks that don't need it end earlier.
DONE = """\
import os, sys, torch, torch.distributed as dist
os.environ["CPULAUNCH_HEARTBEAT_TIMEOUT"] = "5"
dist.init_process_group("ccl")
rank, late, size = dist.get_rank(), int(os.environ["LATE"]), int(os.environ["SIZE"])
x, many = torch.full((size,), float(rank)), [torch.full((size,), 5.0)] * 4
dist.all_reduce(torch.ones(1))
print("up", flush=True)
if rank == late:
    sys.stdin.readline()
if sys.argv[1] == "broadcast":
    dist.broadcast(x, 3 - late)
else:
    dist.scatter(x, many if rank == 3 - late else None, 3 - late)
assert x.unique().tolist() == [5.0 if sys.argv[1] == "scatter" else 3.0 - late], x
if rank % 2:
    dist.destroy_process_group()
"""
# Rank 0, which has the store, ends before it has sent anything to a rank of the group.
MUTE = """\
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("ccl", timeout=timedelta(seconds=60))
rank, x = dist.get_rank(), torch.ones(40)
dist.group.WORLD._get_backend(torch.device("cpu")).monitored_barrier()
if rank == 0:
    os._exit(0)
try:
    if sys.argv[1] == "recv":
        dist.recv(x, rank - 1)
    else:
        dist.broadcast(x, 0)
except dist.DistBackendError as error:
    print(error, flush=True)
    os._exit(7)
"""
SUSPENDED = """\
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
from cpulaunch.ccl import create
create.SILENCE = 4.0
dist.init_process_group("ccl", timeout=timedelta(seconds=5))
x = torch.ones(1000)
dist.all_reduce(x)
if dist.get_rank() == dist.get_world_size() - 1:
    print("up", flush=True)
    sys.stdin.readline()
    dist.all_reduce(x)
else:
    work = dist.all_reduce(x, async_op=True)
    time.sleep(1)  # until the watchdog looks after the others
    print("up", flush=True)
    work.wait()
dist.all_reduce(x)
print("went on", flush=True)
"""
# Rank 0 waits until the test makes rank 1 call the operation.  Another thread of rank 0 reports when the
# waiting thread has slept.
PATIENT = """\
import ctypes, os, re, sys, threading, time, torch, torch.distributed as dist
dist.init_process_group("ccl")
rank, x = dist.get_rank(), torch.ones(1000)
dist.all_reduce(x)
yields = ctypes.CDLL(None).yields

def sleeps():
    with open(f"/proc/self/task/{os.getpid()}/status") as status:
        return int(re.search(r"\\nvoluntary_ctxt_switches:\\s+(\\d+)", status.read())[1])

def watch(before):
    while sleeps() < before + 100:
        time.sleep(0.01)
    print("sleeps", flush=True)

if rank == 1:
    sys.stdin.readline()
else:
    threading.Thread(target=watch, args=[sleeps()]).start()
before = yields()
dist.all_reduce(x)
print(yields() - before)
"""
COUNT_YIELDS = """\
#include <atomic>
#include <sys/syscall.h>
#include <unistd.h>
static std::atomic<int> count;
extern "C" int sched_yield() noexcept { ++count; return syscall(SYS_sched_yield); }
extern "C" int yields() { return count; }
"""
SOON_SILENT = {"SILENCE": "4"}
"""Seconds of silence after which a host counts as lost."""

LONG = 7.0
"""Seconds, more than a silence of 4, the grace period after it, and a timeout of 5."""


def test_intel_mpi_of_the_wheel_carries_oneccl_between_hosts(
    cluster: Cluster, cpulaunch: Run, tmp_path: Path
) -> None:
    """It needs libfabric's path and the same alltoallv algorithm on all ranks, which must end together."""
    (script := tmp_path / "train.py").write_text(OVER_MPI)
    two = cluster.hostfile(tmp_path / "two-nodes", ["node0", "node1"])
    transport = ["--backend", "ccl", "--ccl-transport", "mpi"]
    options = ["--threads", "1", "--oversubscribe", "-ppn", "2", "--tee", "all"]
    done = cpulaunch(
        "run", *mpi_options("intel"), "-f", two, *transport, *options, script, timeout=110, on="login"
    )
    got = sorted(line.partition("got ")[2] for line in done.stdout.splitlines() if "got " in line)
    assert (done.returncode, got) == (0, [f"10.0 {rank}.0" for rank in range(4)]), done.stderr


def test_ranks_may_leave_groups_over_libfabric_in_any_order(
    cluster: Cluster, cpulaunch: Run, tmp_path: Path
) -> None:
    """A rank that leaves a group waits until the others have received what it sent."""
    (script := tmp_path / "train.py").write_text(IN_ANY_ORDER)
    two = cluster.hostfile(tmp_path / "two-nodes", ["node0", "node1"])
    options = ["--ccl-transport", "ofi", "--oversubscribe", "-ppn", "2"]
    done = cpulaunch("run", *mpi_options("intel"), "-f", two, *options, script, timeout=110, on="login")
    assert done.returncode == 0, done.stderr


def test_a_thread_that_waits_for_another_host_soon_sleeps(cluster: Cluster, tmp_path: Path) -> None:
    """If simulated hosts share cores, threads that only yield can starve others for half a minute."""
    (source := tmp_path / "yields.cpp").write_text(COUNT_YIELDS)
    library = tmp_path / "yields.so"
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)
    argv = [sys.executable, "-c", PATIENT]
    counted = {"LD_PRELOAD": str(library)}
    with started_ranks(cluster, hosts_of("2x1"), argv, 90, subprocess.PIPE, **counted) as (waits, late):
        assert waits.stdout is not None
        assert waits.stdout.readline() == "sleeps\n"
        late.communicate("\n")
        yields = int(waits.communicate()[0])
    assert 0 < yields < 2_000


@contextlib.contextmanager
def ranks(
    cluster: Cluster, hosts: list[str], idle: int, **variables: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a rank of WAIT on each of ``hosts``, without a launcher that would end them, and wait for the
    first all_reduce."""
    argv = [sys.executable, "-c", WAIT]
    with started_ranks(cluster, hosts, argv, limit=150, IDLE=idle, **variables) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        yield processes


@pytest.mark.parametrize(
    ("hosts", "dead", "noticed"),
    [
        repeat(["node0", "node0", "node1", "node1"], 3, "rank 3 on node1 has ended"),
        repeat(["node0", "node1"], 1, "the connection to rank 1 on node1 is lost"),
        repeat(["node0", "node1", "node2"], 2, "the connection to rank 2 on node2 is lost"),
        (["node0", "node1"], 0, "the connection to rank 0 on node0 is lost"),
    ],
    ids=["beside another", "alone on its host", "of three hosts", "the one with the store"],
)
def test_a_rank_killed_on_another_host_is_an_error_in_all_others(
    cluster: Cluster, hosts: list[str], dead: int, noticed: str
) -> None:
    with ranks(cluster, hosts, idle=dead) as processes:
        cluster.signal(processes[dead], 9)
        survivors = [process for rank, process in enumerate(processes) if rank != dead]
        # This limit is half of the group's timeout, so the timeout can't be what ends the ranks.
        said = [process.communicate(timeout=60)[0] for process in survivors]
        assert [process.returncode for process in survivors] == [7] * len(survivors), said
        # The last survivor notices the lost rank.  The others are notified, or notice that a survivor ended.
        assert re.search(noticed, said[-1]), said


@pytest.mark.parametrize(
    ("layout", "dead", "noticed"),
    [
        repeat("2x2", 3, "rank 3 on node1 has ended"),
        repeat("2x2", 0, "rank 0 on node0 has ended|the group's store"),
        ("3+1", 3, r"rank 3 on node1 is lost|host node1 \(rank 3\) has given no sign of life"),
    ],
    ids=["beside another", "the one with the store", "alone on its host"],
)
def test_a_rank_killed_on_another_host_is_an_error_over_libfabric_too(
    cluster: Cluster, layout: str, dead: int, noticed: str
) -> None:
    with ranks(cluster, hosts_of(layout), idle=dead, **SOON_SILENT, **OVER_LIBFABRIC) as processes:
        cluster.signal(processes[dead], 9)
        survivors = [process for rank, process in enumerate(processes) if rank != dead]
        said = [process.communicate(timeout=60)[0] for process in survivors]
        assert [process.returncode for process in survivors] == [7] * len(survivors), said
        # One rank notices the lost rank.  The others are notified, or notice that another survivor ended.
        assert any(re.search(noticed, text) for text in said), said


@pytest.mark.parametrize(
    ("hosts", "call"), [repeat("2x2", "broadcast"), ("2x1", "recv"), repeat("4x1", "broadcast")]
)
def test_the_end_of_a_rank_without_connections_is_an_error_in_all_waiting_ranks(
    hosts: str, call: str, cluster: Cluster
) -> None:
    """The rank has no connection that could break, and no other rank can report its end."""
    with started_ranks(cluster, hosts_of(hosts), [sys.executable, "-c", MUTE, call], limit=90) as processes:
        said = [process.communicate(timeout=45)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] + [7] * (len(processes) - 1), said
    gone = r"rank 0 on node0 has ended|the connection to rank \d on node\d is lost: it was closed there"
    assert all(re.search(gone, text) for text in said[1:]), said


APART, TOGETHER = ["node0", "node1", "node2"], ["node0"] * 3


@pytest.mark.parametrize(
    ("hosts", "source"),
    [(APART, "any"), repeat(TOGETHER, "named"), repeat(APART, "named"), repeat(TOGETHER, "any")],
    ids=["apart, any", "together, named", "apart, named", "together, any"],
)
def test_a_rank_may_end_after_its_messages_before_others_send_theirs(
    cluster: Cluster, hosts: list[str], source: str
) -> None:
    argv = [sys.executable, "-c", LEAVE, source]
    with started_ranks(cluster, hosts, argv, limit=90, stdin=subprocess.PIPE) as processes:
        said = [processes[1].communicate(timeout=60)]
        time.sleep(4)  # after 2 s, an ended peer would be an error for ranks that need it
        said += [process.communicate("now\n", timeout=60) for process in (processes[2], processes[0])]
    assert [process.returncode for process in processes] == [0] * 3, said
    assert said[-1][0] == "[1, 2]\n"


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("hosts", "operation", "late", "size", "done"),
    [
        ("2x2", "broadcast", 3, 40, [0, 1]),
        repeat("2x2", "broadcast", 0, 300_000, [3]),  # the kernel still has to send the rest
        repeat("2x2", "scatter", 0, 40, [2, 3]),
        repeat("2x2", "scatter", 3, 4_000_000, [1]),
        repeat("4x1", "broadcast", 2, 40, [0, 1]),
    ],
)
def test_ranks_may_end_while_others_wait_for_a_late_rank(
    hosts: str, operation: str, late: int, size: int, done: list[int], cluster: Cluster
) -> None:
    """Rank 0 has the store, and rank 2 writes its host's heartbeat.  Both may be among the ranks that end."""
    argv = [sys.executable, "-c", DONE, operation]
    variables = {"LATE": late, "SIZE": size}
    with started_ranks(cluster, hosts_of(hosts), argv, 90, subprocess.PIPE, **variables) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        said = {rank: processes[rank].communicate(timeout=60) for rank in done}
        time.sleep(LONG)  # ranks that need a silent or ended rank would fail within this time
        others = [late, *(rank for rank in range(4) if rank not in (late, *done))]
        said |= {rank: processes[rank].communicate("now\n", timeout=60) for rank in others}
    assert [process.returncode for process in processes] == [0] * 4, said


def test_the_loss_of_a_hosts_network_is_an_error_on_the_other_hosts(cluster: Cluster) -> None:
    three = ranks(cluster, ["node0", "node1", "node2"], idle=2, **SOON_SILENT)
    with three as processes, cluster.cut("node2"):
        said = [process.communicate(timeout=60)[0] for process in processes[:2]]
        assert all("host node2 (rank 2) has given no sign of life" in text for text in said), said


def test_a_job_goes_on_after_it_was_suspended(cluster: Cluster) -> None:
    """When a batch system suspends a job, time passes, but no rank can send a heartbeat."""
    argv = [sys.executable, "-c", SUSPENDED]
    hosts = ["node0", "node0", "node1"]
    with started_ranks(cluster, hosts, argv, limit=120, stdin=subprocess.PIPE) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        for process in processes:
            cluster.signal(process, signal.SIGSTOP)
        time.sleep(LONG)
        for process, host in zip(processes, hosts, strict=True):
            if host != hosts[0]:
                time.sleep(
                    3
                )  # the first host suspects this host; after another 2 s, a suspicion would be an error
            cluster.signal(process, signal.SIGCONT)
        said = [process.communicate("go on\n", timeout=60) for process in reversed(processes)]
    assert [out for out, _ in said] == ["went on\n"] * len(hosts), said


@pytest.mark.parametrize(
    ("stopped", "variables"),
    [repeat(0, {}), repeat(2, {}), repeat(2, OVER_LIBFABRIC)],
    ids=["the one with the store", "", "libfabric"],
)
def test_the_host_of_a_stopped_rank_is_lost_if_its_network_fails(
    stopped: int, variables: dict[str, str], cluster: Cluster
) -> None:
    with ranks(
        cluster, ["node0", "node1", "node2"], idle=stopped, CPULAUNCH_HEARTBEAT_TIMEOUT="5", **variables
    ) as processes:
        cluster.signal(processes[stopped], signal.SIGSTOP)
        time.sleep(LONG)
        others = [process for rank, process in enumerate(processes) if rank != stopped]
        assert [process.poll() for process in others] == [None, None]
        with cluster.cut(f"node{stopped}"):
            said = [process.communicate(timeout=60)[0] for process in others]
    assert all("the group's store" in text or "has given no sign of life" in text for text in said), said
