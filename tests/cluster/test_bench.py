"""`cpulaunch bench` on several hosts."""

from __future__ import annotations

import json

import pytest
from support.marks import repeat

from cluster.conftest import Run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [repeat("node1:2,node2:2"), "node1:2,node2:1"])
def test_the_link_between_hosts_is_measured(cpulaunch: Run, ranks: str) -> None:
    options = ("--sizes", "64K", "--operations", "all_reduce,send_recv", "--format", "json")
    done = cpulaunch(
        "bench", "--launcher", "ssh", "--hosts", ranks, "--oversubscribe", *options, timeout=180.0
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [host["ranks"] for host in document["hosts"]] == [int(host[-1]) for host in ranks.split(",")]
    assert document["link_bytes_per_second"] > 0
    assert document["one_connection_bytes_per_second"] > 0
    assert document["latency_us"] > 0
    wire = (
        65536 / document["link_bytes_per_second"] * 1e6
    )  # both operations send the tensor once over the link
    assert all(row["limit_us"] >= wire for row in document["rows"])
