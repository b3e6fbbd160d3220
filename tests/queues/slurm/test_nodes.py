"""Nodes as sinfo describes them."""

from __future__ import annotations

import re

import pytest

from cpulaunch.errors import HostError, UsageError
from cpulaunch.queues.slurm.nodes import demand_room, facts_of, most_nodes

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
def test_the_most_frequent_kind_of_node_is_used(options: dict[str, str], shown: str) -> None:
    # With --partition, sinfo names no other partition.
    text = "".join(line for line in SINFO.splitlines(True) if line.startswith(options.get("--partition", "")))
    assert str(most_nodes(text, options)) == shown


def test_no_partition_has_the_requested_nodes() -> None:
    with pytest.raises(HostError, match="sinfo lists no such node"):
        most_nodes(SINFO, {"--constraint": "arm"})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"--nodes": "128"}, None),
        ({"--nodes": "129"}, "--nodes=129: partition batch has 128 nodes"),
        ({"--nodes": "129", "--nodelist": "a[1-129]"}, None),
        ({"--cpus-per-task": "112"}, None),
        (
            {"--cpus-per-task": "113"},
            "--cpus-per-task=113: 113 CPUs per node, but nodes of partition batch have at most 112",
        ),
        ({"--cpus-per-task": "57", "--ntasks-per-node": "2"}, "114 CPUs per node"),
        ({"--cpus-per-task": "113", "--overcommit": ""}, None),
    ],
)
def test_a_job_that_does_not_fit_an_idle_cluster(options: dict[str, str], why: str | None) -> None:
    if why is None:
        demand_room(SINFO, options)
        return
    with pytest.raises(UsageError, match=re.escape(why)):
        demand_room(SINFO, options)


SEVERAL = "thin|2|28|1|256000|96|(null)\nfat|8|28|1|2048000|2|(null)\n"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"--nodes": "96", "--cpus-per-task": "56"}, None),  # thin
        ({"--nodes": "2", "--cpus-per-task": "224"}, None),  # fat
        ({"--nodes": "97"}, "partition thin has 96 nodes"),
        ({"--nodes": "3", "--cpus-per-task": "224"}, "nodes of partition thin have at most 56"),
    ],
)
def test_at_least_one_of_several_partitions_must_fit_the_job(
    options: dict[str, str], why: str | None
) -> None:
    options = {**options, "--partition": "thin,fat"}
    if why is None:
        demand_room(SEVERAL, options)
        return
    with pytest.raises(UsageError, match=re.escape(why)):
        demand_room(SEVERAL, options)


def test_a_socket_is_a_numa_node_and_threads_have_linuxs_numbers() -> None:
    topology = facts_of(most_nodes(SINFO, {})).topology
    assert str(topology.allowed) == "0-111"
    assert [(c.core, c.socket, c.node) for c in topology.cpus if c.cpu in (27, 28, 56, 111)] == [
        (27, 0, 0),
        (28, 1, 1),
        (0, 0, 0),
        (55, 1, 1),
    ]
