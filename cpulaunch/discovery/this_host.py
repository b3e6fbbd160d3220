"""This host's topology, as this process may use it."""

from __future__ import annotations

import os

from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Topology


def topology_here() -> Topology:
    """What sysfs says, restricted to the CPUs and the quota that this process may use."""
    return Topology.of_process(read_file, CoreSet(os.sched_getaffinity(0)))


def read_file(path: str) -> str | None:
    """The text of a file of sysfs or procfs; None where there is none, or it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return None
