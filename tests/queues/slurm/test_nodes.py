"""Nodes as sinfo describes them."""

from __future__ import annotations

import pytest

from cpulaunch.errors import HostError
from cpulaunch.queues.slurm.nodes import facts_of, most_nodes

# Partition, sockets, cores, threads, MB, number, features.
SINFO = """\
CLUSTER: test
batch*|2|28|2|256000|96|sapphire,ib
batch*|2|16|1|128000+|32|skylake
big|8|28|1|2048000|200|(null)
broken|0|0|0|0|4|(null)
"""


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "partition batch (2 sockets × 28 cores × 2 threads, 250 GiB)"),
        ({"--constraint": "skylake"}, "partition batch (2 sockets × 16 cores × 1 thread, 125 GiB)"),
        ({"--constraint": "sapphire&ib"}, "partition batch (2 sockets × 28 cores × 2 threads, 250 GiB)"),
        ({"--partition": "big"}, "partition big (8 sockets × 28 cores × 1 thread, 2000 GiB)"),
    ],
)
def test_nodes_are_those_of_the_kind_that_there_are_most_of(options: dict[str, str], shown: str) -> None:
    # With a partition, sinfo has named no other.
    text = "".join(line for line in SINFO.splitlines(True) if line.startswith(options.get("--partition", "")))
    assert str(most_nodes(text, options)) == shown


def test_nobody_has_such_nodes() -> None:
    with pytest.raises(HostError, match="sinfo names no such node"):
        most_nodes(SINFO, {"--constraint": "arm"})


def test_cores_of_a_socket_are_a_numa_node_and_threads_are_numbered_as_linux_does() -> None:
    topology = facts_of(most_nodes(SINFO, {})).topology
    assert str(topology.allowed) == "0-111"
    assert [(c.core, c.socket, c.node) for c in topology.cpus if c.cpu in (27, 28, 56, 111)] == [
        (27, 0, 0),
        (28, 1, 1),
        (0, 0, 0),
        (55, 1, 1),
    ]


def test_a_share_of_a_node_is_whole_cores() -> None:
    topology = facts_of(most_nodes(SINFO, {}), cpus=5).topology
    assert str(topology.allowed) == "0-2,56-58"
