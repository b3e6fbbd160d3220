"""The machines of the placement tests, and the notation of bindings in their tables.

``machine_files/*.json`` are sysfs trees (path → text), ``machine_files/*.txt`` the output of ``lscpu``.  They
describe the layouts of such machines with the necessary files.  None is a full recording.
"""

from __future__ import annotations

import json
from pathlib import Path

from cpulaunch.discovery.host.lscpu import topology_from_lscpu
from cpulaunch.discovery.host.sysfs import topology_from_sysfs
from cpulaunch.discovery.host.this_host import topology_of_process
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Topology
from cpulaunch.plan.binding import Binding

HERE = Path(__file__).parent
MACHINES = sorted(path.stem for path in (HERE / "machine_files").iterdir())


def machine(name: str) -> Topology:
    """The topology that cpulaunch would read there, with the CPU mask ``affinity``, if any."""
    text = HERE / "machine_files" / f"{name}.txt"
    if text.exists():
        return topology_from_lscpu(text.read_text())
    described = json.loads((HERE / "machine_files" / f"{name}.json").read_text())
    if "affinity" in described:
        return topology_of_process(described["files"].get, CoreSet.parse(described["affinity"]))
    return topology_from_sysfs(described["files"].get)


def table(binding: Binding) -> str:
    """A binding in the notation of the tables in ``bindings/``."""
    rows = [("rank", "comm", "cores", "nodes", "threads")]
    for rank in binding.ranks:
        cells = (rank.local_rank, rank.comm_cores, rank.cores, rank.numa_nodes, rank.threads)
        rows.append(tuple(str(cell) or "-" for cell in cells))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(f"idle {binding.idle or '-'}; workers {binding.worker_count}")
    return "\n".join([*lines, *(f"note: {note}" for note in binding.notes)])
