"""The CPUs of one host that ranks may use, with the core, socket and NUMA node of each.

`discovery.host.sysfs` reads a topology from sysfs, and `discovery.host.lscpu` from the output of lscpu.
Recorded facts contain topologies of other machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet


@dataclass(frozen=True)
class Cpu:
    """A logical CPU that is online and that this process may use.

    CPUs with the same ``core`` are hyperthread siblings; core numbers are unique on the machine.
    ``performance`` is the maximum frequency in MHz or the kernel's ``cpu_capacity``, or None.
    """

    cpu: int
    core: int
    socket: int = 0
    node: int = 0
    performance: float | None = None


@dataclass(frozen=True)
class Core:
    """A physical core; ``cpus`` are its usable CPUs in ascending order."""

    cpus: tuple[int, ...]
    socket: int
    node: int
    efficient: bool
    """Whether this is an E-core: clearly slower than the machine's fastest cores."""


@dataclass(frozen=True)
class Topology:
    """A host's CPUs, as its operating system reports them.

    ``cpus`` are the online CPUs that ranks may use, in ascending order.  ``quota`` is the control group's
    limit of CPU time in CPUs, or None; 200 ms per 100 ms in ``cpu.max`` are 2.0.
    """

    cpus: tuple[Cpu, ...]
    memory_only_nodes: CoreSet = field(default_factory=CoreSet)
    quota: float | None = None
    notes: tuple[str, ...] = ()

    def __hash__(self) -> int:
        # Hashing hundreds of CPUs for each of a thousand hosts would take a second.
        return hash((len(self.cpus), self.cpus[:1], self.cpus[-1:], self.quota))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Topology:
        """Undo `to_json`.  Raises `ConfigError` for other data."""
        try:
            rows = data["cpus"]
            if not all(4 <= len(row) <= 5 and all(isinstance(n, int) for n in row[:4]) for row in rows):
                raise TypeError("the row of a CPU must be [cpu, core, socket, node]")
            return cls(
                cpus=tuple(Cpu(*row) for row in rows),
                memory_only_nodes=CoreSet.parse(data.get("memory_only_nodes", "")),
                quota=data.get("quota"),
                notes=tuple(data.get("notes", ())),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"not a recorded topology: {error!r}", hint="Record the facts again."
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with a row ``[cpu, core, socket, node]`` or ``[…, performance]`` per CPU."""
        rows: list[list[float]] = []
        for c in self.cpus:
            rows.append([c.cpu, c.core, c.socket, c.node])
            if c.performance is not None:
                rows[-1].append(c.performance)
        data: dict[str, Any] = {"cpus": rows}
        if self.memory_only_nodes:
            data["memory_only_nodes"] = str(self.memory_only_nodes)
        if self.quota is not None:
            data["quota"] = self.quota
        if self.notes:
            data["notes"] = list(self.notes)
        return data

    def restricted(self, allowed: CoreSet) -> Topology:
        """Return this topology without the CPUs that are not in ``allowed``."""
        return replace(self, cpus=tuple(c for c in self.cpus if c.cpu in allowed))

    def first(self, cpus: int) -> Topology:
        """Return this topology with its first cores only, which have at least ``cpus`` CPUs."""
        taken: list[int] = []
        for core in self.cores:
            if len(taken) >= cpus:
                break
            taken += core.cpus
        return self.restricted(CoreSet(taken))

    @cached_property
    def allowed(self) -> CoreSet:
        """The numbers of all CPUs."""
        return CoreSet(c.cpu for c in self.cpus)

    @cached_property
    def nodes(self) -> CoreSet:
        """The NUMA nodes that have CPUs."""
        return CoreSet(c.node for c in self.cpus)

    @cached_property
    def sockets(self) -> CoreSet:
        """The sockets that have CPUs."""
        return CoreSet(c.socket for c in self.cpus)

    @cached_property
    def cores(self) -> tuple[Core, ...]:
        """The physical cores, ordered by NUMA node, then by first CPU."""
        siblings: dict[int, list[Cpu]] = {}
        for cpu in self.cpus:
            siblings.setdefault(cpu.core, []).append(cpu)
        slow = _efficient_below(c.performance for c in self.cpus)
        cores = [
            Core(
                cpus=tuple(c.cpu for c in group),
                socket=group[0].socket,
                node=group[0].node,
                efficient=max(c.performance or slow for c in group) < slow,
            )
            for group in siblings.values()
        ]
        return tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))


def _efficient_below(performances: Iterable[float | None]) -> float:
    """Return the performance below which a core is an E-core; 0 if all cores are of one kind.

    Cores of one kind differ by a few per cent, for example with Turbo Boost Max.  E-cores are at least a
    tenth slower than P-cores: 4600 and 5200 MHz on a Core Ultra 5 245K, 3800 and 4800 MHz on a Core Ultra 7
    155H, capacities of about 720 and 1024 on an Nvidia GB10.
    """
    known = sorted({p for p in performances if p}, reverse=True)
    for faster, slower in pairwise(known):
        if slower < 0.9 * faster:
            return faster
    return 0.0


def renumbered(rows: Iterable[Cpu]) -> tuple[Cpu, ...]:
    """Sort the CPUs, and number cores and sockets from 0 in the order of their first CPUs.

    sysfs repeats core numbers in each socket, and some firmware numbers sockets arbitrarily.
    """
    cores: dict[tuple[int, int, int], int] = {}
    sockets: dict[int, int] = {}
    cpus = []
    for row in sorted(rows, key=lambda row: row.cpu):
        socket = sockets.setdefault(row.socket, len(sockets))
        core = cores.setdefault((row.node, row.socket, row.core), len(cores))
        cpus.append(replace(row, core=core, socket=socket))
    return tuple(cpus)
