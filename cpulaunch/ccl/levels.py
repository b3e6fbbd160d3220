"""Groups the ranks of a host by socket, NUMA node or last-level cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet

CPUS = Path("/sys/devices/system/cpu")

_LEAST_RANKS = 4
"""Minimum number of ranks in a group, as in csrc/core/layout.hpp."""


class Parts(NamedTuple):
    """The socket, NUMA node and last-level cache of a rank; -1 if its CPUs have several, or if unknown."""

    socket: int = -1
    node: int = -1
    cache: int = -1  # number of the first CPU that shares it

    @classmethod
    def of(cls, cpus: Sequence[int], root: Path = CPUS) -> Parts:
        """Return the parts of ``cpus``, which sysfs shows."""
        readers = (_socket, _node, _cache)
        return cls(*(_common([read(root / f"cpu{cpu}") for cpu in cpus]) for read in readers))


def groups_of(ranks: Sequence[Parts]) -> list[int]:
    """Return the group of each rank of a host; -1 for all ranks if there are no groups.

    Ranks sum within their group first.  The ranks of a socket are a group if there are several sockets, and
    each has the same number of ranks, at least four.  Otherwise, this rule is applied to NUMA nodes, then to
    last-level caches.
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
