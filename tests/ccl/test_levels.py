"""How the ranks of a host are grouped.  The machines are made-up sysfs trees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpulaunch.ccl.levels import Parts, groups_of
from cpulaunch.ccl.meeting import Peer, groups_of_host
from cpulaunch.model.cores import CoreSet


def machine(root: Path, sockets: int, nodes: int, caches: int, cores: int) -> None:
    """Write a machine's files, with ``nodes`` per socket, ``caches`` per node, and ``cores`` per cache."""
    for number in range(sockets * nodes * caches):
        cpus = range(number * cores, (number + 1) * cores)
        for cpu in cpus:
            directory = root / f"cpu{cpu}"
            (directory / "topology").mkdir(parents=True)
            (directory / "topology/physical_package_id").write_text(f"{number // (nodes * caches)}\n")
            (directory / f"node{number // caches}").mkdir()
            (directory / "cache/index3").mkdir(parents=True)
            (directory / "cache/index3/shared_cpu_list").write_text(f"{CoreSet(cpus)}\n")


def groups(root: Path, ranks: int, cpus: range) -> list[int]:
    """The groups of ``ranks`` ranks that divide these CPUs among themselves."""
    each = len(cpus) // ranks
    return groups_of([Parts.of(cpus[rank * each : (rank + 1) * each], root) for rank in range(ranks)])


@pytest.mark.parametrize(
    ("layout", "ranks", "cpus", "expected"),
    [
        # two sockets of 56 cores, two nodes each (SNC2), whose cores share a cache
        ((2, 2, 1, 28), 2, range(112), [-1, -1]),
        ((2, 2, 1, 28), 4, range(112), [-1] * 4),  # two ranks per socket don't make a group
        ((2, 2, 1, 28), 8, range(112), [0] * 4 + [1] * 4),
        ((2, 2, 1, 28), 8, range(56), [0] * 4 + [1] * 4),  # on one socket, its nodes are the groups
        ((2, 2, 1, 28), 16, range(112), [0] * 8 + [1] * 8),
        # one socket of 64 cores in four nodes (NPS4), with two caches for 8 cores each
        ((1, 4, 2, 8), 4, range(64), [-1] * 4),
        ((1, 4, 2, 8), 16, range(64), [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4),
        ((1, 4, 2, 8), 8, range(16), [0] * 4 + [8] * 4),  # on one node, its caches are the groups
        # one node with eight caches
        ((1, 1, 8, 8), 8, range(64), [-1] * 8),
        ((1, 1, 8, 8), 32, range(64), [8 * (rank // 4) for rank in range(32)]),
        # a rank that spans two sockets, and numbers of ranks that can't be divided evenly
        ((2, 1, 1, 28), 1, range(56), [-1]),
        ((2, 1, 1, 28), 7, range(56), [-1] * 7),
        ((2, 1, 1, 28), 9, range(54), [-1] * 9),
    ],
)
def test_groups_are_the_largest_parts_with_equal_numbers_of_ranks(
    tmp_path: Path, layout: tuple[int, int, int, int], ranks: int, cpus: range, expected: list[int]
) -> None:
    machine(tmp_path, *layout)
    assert groups(tmp_path, ranks, cpus) == expected


def test_a_part_of_a_rank_contains_all_its_cpus(tmp_path: Path) -> None:
    machine(tmp_path, 2, 2, 2, 4)
    assert Parts.of([8, 9], tmp_path) == Parts(0, 1, 8)
    assert Parts.of([8, 15], tmp_path) == Parts(0, 1, -1)
    assert Parts.of([0, 15], tmp_path) == Parts(0, -1, -1)
    assert Parts.of([0, 31], tmp_path) == Parts(-1, -1, -1)


def test_without_files_in_sysfs_parts_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "cpu0/topology").mkdir(parents=True)
    assert Parts.of([0], tmp_path) == Parts(-1, -1, -1)
    assert groups_of([Parts()] * 8) == [-1] * 8


def test_a_rank_groups_only_the_ranks_of_its_own_host(tmp_path: Path) -> None:
    """It uses the data that ranks exchange as JSON."""
    machine(tmp_path, 1, 2, 1, 4)
    places = [Parts.of([cpu], tmp_path) for cpu in range(8)]
    peers = [Peer(host, 1, [cpu], place) for host in "ab" for cpu, place in enumerate(places)]
    received = [Peer(*each) for each in json.loads(json.dumps(peers))]
    assert groups_of_host(0, received) == [0, 0, 0, 0, 1, 1, 1, 1] + [-1] * 8
    assert groups_of_host(8, received) == [-1] * 8 + [0, 0, 0, 0, 1, 1, 1, 1]
