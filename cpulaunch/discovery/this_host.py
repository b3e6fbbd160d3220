"""This host's topology, as this process may use it."""

from __future__ import annotations

import os

import cpulaunch
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.installation import Installation
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


def installation_here() -> Installation:
    """The paths of this cpulaunch."""
    package = os.path.dirname(os.path.abspath(cpulaunch.__file__))
    return Installation(
        agent=os.path.join(package, "agent", "run_agent.py"),
        ssh=os.path.join(package, "launchers", "ssh.sh"),
    )
