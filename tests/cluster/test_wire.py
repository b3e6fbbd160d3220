"""The bytes that the ccl process group sends between hosts, counted by the hosts' network interfaces."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from support.faults import Cluster
from support.marks import repeat
from support.ranks import OVER_LIBFABRIC, answers, hosts_of, started_ranks

from cpulaunch.bench.limits import least_wire
from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

SIZES = (256 << 10, 1 << 20, 16 << 20)
"""Bytes of a rank's tensor."""

HEADERS = 1.05
"""Factor by which a host may send more than its data, for headers, acknowledgements and heartbeats."""

# Each size is sent at least three times, and 8 MB in total, so that other traffic hardly matters.
MOVE = """\
import json, sys, torch, torch.distributed as dist
from support.wire import Meeting
dist.init_process_group("ccl")
rank, size = dist.get_rank(), dist.get_world_size()
meeting = Meeting()

def call(operation, x, whole):
    # Returns the result and the expected result; `x(r)` is the input of rank r, with `whole` numbers.
    mine, everything = x(rank), torch.stack([x(r) for r in range(size)])
    parts, blank = everything.view(size, size, -1), torch.empty(whole // size)
    if operation == "all_reduce":
        dist.all_reduce(mine)
        return mine, everything.sum(0)
    if operation == "all_gather":
        every = torch.empty(whole)
        dist.all_gather_into_tensor(every, mine.view(size, -1)[rank].clone())
        return every, torch.cat([parts[r, r] for r in range(size)])
    if operation == "reduce_scatter":
        dist.reduce_scatter_tensor(blank, mine)
        return blank, parts[:, rank].sum(0)
    if operation == "broadcast":
        dist.broadcast(mine, 1)
        return mine, everything[1]
    if operation == "all_to_all":
        every = torch.empty(whole)
        dist.all_to_all_single(every, mine)
        return every, parts[:, rank].reshape(-1)
    dist.group.WORLD._get_backend(mine.device).average_compressed(mine).wait()
    return mine, everything.mean(0)

def move(operation, number, times):
    pattern = torch.arange(number // 4) % 1009.0
    for turn in range(times):
        found, right = call(operation, lambda r: pattern * (r + 1) + turn, number // 4)
        if operation == "compressed":
            torch.testing.assert_close(found, right, rtol=2**-7, atol=0)
        else:
            assert found.equal(right), (operation, number, turn)

wire = {}
for operation in sys.argv[1].split(","):
    for number in map(int, sys.argv[2:]):
        move(operation, number, 1)
        times = max(3, (8 << 20) // number)
        sent = meeting.count(lambda: move(operation, number, times))
        wire[f"{operation} of {number}"] = sent / (times * number)
print(json.dumps(wire))
dist.barrier()  # the store that others still read from ends with rank 0
dist.destroy_process_group()
"""

# Rank 0 broadcasts while rank 1 is busy, and prints the unsent bytes in its kernel, counted by SIOCOUTQNSD.
WAIT = """\
import fcntl, json, os, stat, struct, torch, torch.distributed as dist
from support.wire import Meeting
dist.init_process_group("ccl")
meeting, data = Meeting(), torch.zeros(16 << 20)

def unsent(fd):
    try:
        return struct.unpack("i", fcntl.ioctl(fd, 0x894B, b"    "))[0]
    except OSError:  # no connection
        return 0

def most():
    return max(unsent(int(fd)) for fd in os.listdir("/proc/self/fd"))

for _ in range(3):  # makes the kernel's buffers grow
    dist.broadcast(data, 0)
waiting = []
if dist.get_rank() == 0:
    work = dist.broadcast(data, 0, async_op=True)
    while len(waiting) < 100 or waiting[-1] == 0 or waiting[-1] != waiting[-100]:
        waiting.append(most())
    meeting.exchange()
    work.wait()
else:
    meeting.exchange()
    dist.broadcast(data, 0)
print(json.dumps(waiting[-1:]))
dist.barrier()  # the store that others still read from ends with rank 0
dist.destroy_process_group()
"""


def check(
    cluster: Cluster,
    layout: str,
    operations: dict[str, float],
    sizes: Sequence[int] = SIZES,
    **variables: str,
) -> None:
    """Check that the busiest host sends the given minimum in each operation, apart from headers."""
    argv = [sys.executable, "-c", MOVE, ",".join(operations), *map(str, sizes)]
    with started_ranks(cluster, hosts_of(layout), argv, limit=150, **variables) as processes:
        said = answers(processes)
    found = {name: max(of_rank[name] for of_rank in said) for name in said[0]}
    least = {f"{operation} of {size}": operations[operation] for operation in operations for size in sizes}
    # A ratio below 1 is an error, too.
    wrong = [f"{name}: {found[name]}" for name in found if not 1 <= found[name] / least[name] <= HEADERS]
    assert not wrong, least


def least(layout: str, *operations: str) -> dict[str, float]:
    return {operation: least_wire(operation, hosts_of(layout)) for operation in operations}


@pytest.mark.parametrize("layout", [repeat("2x2"), repeat("4x2"), repeat("3+1")])
def test_a_sum_over_libfabric_crosses_the_network_once_per_host(cluster: Cluster, layout: str) -> None:
    check(cluster, layout, least(layout, "all_reduce"), **OVER_LIBFABRIC)


@pytest.mark.parametrize("over", ["sockets", repeat("libfabric")])
@pytest.mark.parametrize("layout", ["2x2", repeat("4x2")])
def test_collectives_cross_the_network_once_per_host(cluster: Cluster, layout: str, over: str) -> None:
    """Compressed averages send half of the bytes."""
    operations = least(layout, "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    if over == "sockets":
        operations["compressed"] = operations["all_reduce"] / 2
    # The broadcast of a smaller size uses a tree of hosts, and its root sends the data more than once.
    check(cluster, layout, operations, SIZES[2:], **(OVER_LIBFABRIC if over == "libfabric" else {}))


def test_the_senders_kernel_holds_few_unsent_bytes(cluster: Cluster) -> None:
    with started_ranks(cluster, hosts_of("2x1"), [sys.executable, "-c", WAIT], limit=60) as processes:
        [[waiting], _] = answers(processes)
    assert 0 < waiting <= 512 << 10
