"""What the ccl process group sends between hosts: bytes, as the hosts' interfaces count them."""

from __future__ import annotations

import sys

import pytest
from support.faults import Cluster
from support.ranks import answers, hosts_of, started_ranks
from support.wire import least_wire

from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

SIZES = (256 << 10, 1 << 20, 16 << 20)
"""Bytes of a rank's tensor."""

HEADERS = 1.05
"""How much more than its data a host may send: headers, acknowledgements, the store's heartbeats."""

# Each size is summed until 8 MB are through, and thrice at least, so that what else is sent doesn't count.
SUM = """\
import json, sys, torch, torch.distributed as dist
from support.wire import Meeting
dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
meeting = Meeting()

def add(number, times):
    pattern = torch.arange(number // 4) % 1009.0
    for turn in range(times):
        x = pattern * (rank + 1) + turn
        total = pattern * (size * (size + 1) / 2) + turn * size
        if sys.argv[2] == "exact":
            dist.all_reduce(x)
            assert x.equal(total), (number, turn)
        else:
            dist.group.WORLD._get_backend(x.device).average_compressed(x).wait()
            torch.testing.assert_close(x, total / size, rtol=2**-7, atol=0)

wire = {}
for number in map(int, sys.argv[3:]):
    add(number, 1)
    times = max(3, (8 << 20) // number)
    wire[number] = meeting.count(lambda: add(number, times)) / (times * number)
print(json.dumps(wire))
dist.barrier()  # the store that others still read from ends with rank 0
dist.destroy_process_group()
"""


def wires(cluster: Cluster, hosts: list[str], precision: str = "exact", **variables: str) -> dict[int, float]:
    """Size → bytes that the busiest host sends for a sum, in sizes of the tensor."""
    argv = [sys.executable, "-c", SUM, "ccl", precision, *map(str, SIZES)]
    with started_ranks(cluster, hosts, argv, limit=150, **variables) as processes:
        said = answers(processes)
    return {size: max(of_rank[str(size)] for of_rank in said) for size in SIZES}


@pytest.mark.parametrize("layout", ["2x2", "4x2", "2x4", "3+1"])
def test_a_sum_crosses_the_network_once_for_each_host_not_for_each_rank(
    cluster: Cluster, layout: str
) -> None:
    hosts = hosts_of(layout)
    least = least_wire("all_reduce", hosts)
    check(wires(cluster, hosts), least)


@pytest.mark.parametrize("layout", ["2x2", "4x2", "3+1"])
def test_so_does_a_sum_over_oneccl(cluster: Cluster, layout: str) -> None:
    hosts = hosts_of(layout)
    found = wires(cluster, hosts, CPULAUNCH_RANK_CCL_TRANSPORT="ofi")
    check(found, least_wire("all_reduce", hosts))


def check(found: dict[int, float], least: float) -> None:
    """All sizes send the least, but for headers."""
    # Where it is less than the least, the count is wrong.
    wrong = {size: wire for size, wire in found.items() if not least <= wire <= HEADERS * least}
    assert not wrong, f"the least is {least}"


@pytest.mark.parametrize("layout", ["2x2", "4x2"])
def test_a_compressed_sum_sends_half_of_that(cluster: Cluster, layout: str) -> None:
    hosts = hosts_of(layout)
    least = least_wire("all_reduce", hosts) / 2
    check(wires(cluster, hosts, "compressed"), least)
