"""Hosts with several network interfaces.  Each rank uses one of them."""

from __future__ import annotations

import sys

import pytest
from support.faults import Cluster
from support.ranks import answers, hosts_of, started_ranks

from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

SEND = """
import json, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
dist.init_process_group("ccl", timeout=timedelta(seconds=60))
size, files = dist.get_world_size(), [f"/sys/class/net/{name}/statistics/tx_bytes" for name in ("eth0", "rail1")]
dist.barrier()
before = [int(Path(file).read_text()) for file in files]
dist.all_reduce(torch.ones(2_000_000))
every = torch.zeros(size * 100_000)  # also connects ranks that use different interfaces
dist.all_to_all_single(every, torch.ones(size * 100_000))
assert every.eq(1).all()
dist.barrier()
print(json.dumps([int(Path(file).read_text()) - sent for file, sent in zip(files, before)]))
"""
ARGV = [sys.executable, "-c", SEND]
BOTH = {"GLOO_SOCKET_IFNAME": "eth0,rail1"}


def test_ranks_take_turns_on_the_named_interfaces(cluster: Cluster) -> None:
    with (
        cluster.second_network("node0", "node1"),
        started_ranks(cluster, hosts_of("2x2"), ARGV, 90, **BOTH) as processes,
    ):
        sent = answers(processes)
    for first, second in sent:
        assert first > 4_000_000
        assert 0.8 * first < second < 1.25 * first


def test_the_interface_that_leads_nowhere_is_named(cluster: Cluster) -> None:
    with cluster.second_network("node0", "node1") as addresses:
        here, there = addresses["node0"], addresses["node1"]
        with (
            cluster.unroutable("node0", "node1", there),
            started_ranks(cluster, hosts_of("2x2"), ARGV, 90, **BOTH) as processes,
            pytest.raises(RuntimeError) as failure,
        ):
            answers(processes)
    lost = f"the connection to rank 3 on node1 is lost: {there}, from {here}, can't be reached: "
    assert lost in str(failure.value)
