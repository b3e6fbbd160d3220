"""Finds the sockets, NUMA nodes and caches that ranks run on, and groups the ranks of a host by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet

CPUS = Path("/sys/devices/system/cpu")

_LEAST_RANKS = 4
"""The minimum size of a group; `Layout` in csrc/core/layout.hpp has the same."""


class Parts(NamedTuple):
    """The socket, NUMA node and last-level cache that all CPUs of a rank share; -1: none, or unknown.

    A last-level cache has the number of the first CPU that shares it.
    """

    socket: int = -1
    node: int = -1
    cache: int = -1

    @classmethod
    def of(cls, cpus: Sequence[int], root: Path = CPUS) -> Parts:
        """Return the parts that these CPUs belong to, as sysfs shows them."""
        readers = (_socket, _node, _cache)
        return cls(*(_common([read(root / f"cpu{cpu}") for cpu in cpus]) for read in readers))


def groups_of(ranks: Sequence[Parts]) -> list[int]:
    """Return the group in which each rank of a host sums first; -1 for all ranks if there are no groups.

    The ranks on a socket are a group if there are several sockets, each with equally many ranks, four or
    more.  Otherwise the same rule applies to NUMA nodes, and then to last-level caches.
    """
    for level in zip(*ranks, strict=True):
        counts = Counter(level)
        if -1 in counts or len(counts) == 1:
            continue
        if len(set(counts.values())) == 1 and min(counts.values()) >= _LEAST_RANKS:
            return list(level)
    return [-1] * len(ranks)


def _common(numbers: Sequence[int]) -> int:
    return numbers[0] if len(set(numbers)) == 1 else -1


def _socket(cpu: Path) -> int:
    try:
        return int((cpu / "topology/physical_package_id").read_text())
    except (OSError, ValueError):
        return -1


def _node(cpu: Path) -> int:
    nodes = [path.name.removeprefix("node") for path in cpu.glob("node[0-9]*")]
    return int(nodes[0]) if len(nodes) == 1 else -1


def _cache(cpu: Path) -> int:
    try:
        return min(CoreSet.parse((cpu / "cache/index3/shared_cpu_list").read_text()))
    except (OSError, ValueError, ConfigError):
        return -1
