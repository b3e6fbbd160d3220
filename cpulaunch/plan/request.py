"""Requests that are the same for every host of a job.  Plain values, with a JSON round trip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from cpulaunch.model.cores import CoreSet


@dataclass(frozen=True)
class BindingRequest:
    """Request for the placement on one host; the defaults are those of the command line.

    ``ranks``: local ranks; None means one per NUMA node that has usable cores.
    ``cores_per_rank``: physical cores, including comm cores; ``max`` also shares out leftover cores.
    ``cores``, ``numa_nodes``: use only these CPUs, only these nodes.
    ``bind_numa``: each rank within one NUMA node, the nodes filled evenly.
    ``logical_cores``: ranks also get a core's hyperthread siblings.
    ``e_cores``: E-cores are used like others.
    ``strategy``: if not all cores are needed, ``scatter`` spreads ranks over the nodes, ``close`` packs them;
    with ``none``, ranks are not pinned.
    ``worker_count``: communication threads per rank; auto: one, where a rank is large enough.
    ``ccl_logical_cores``: communication runs on hyperthread siblings.
    ``dedicate_workers``: False: no comm cores at all.
    ``oversubscribe``: ranks may share cores.
    ``threads``: OpenMP threads per rank.
    ``instances``: the ranks are instances; with a number of cores and without ``ranks``, as many as fit.
    """

    ranks: int | None = None
    cores_per_rank: int | Literal["auto", "max"] = "auto"
    cores: CoreSet | None = None
    numa_nodes: CoreSet | None = None
    bind_numa: bool = False
    logical_cores: bool = False
    e_cores: bool = False
    strategy: Literal["scatter", "close", "none"] = "scatter"
    worker_count: int | Literal["auto"] = "auto"
    ccl_logical_cores: bool = False
    dedicate_workers: bool = True
    oversubscribe: bool = False
    threads: int | Literal["auto"] = "auto"
    instances: bool = False

    @property
    def noun(self) -> str:
        """The word for a rank."""
        return "instance" if self.instances else "rank"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, without defaults."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {key: str(value) if isinstance(value, CoreSet) else value for key, value in data.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BindingRequest:
        """Undo `to_json`."""
        lists = {key: CoreSet.parse(data[key]) for key in ("cores", "numa_nodes") if key in data}
        return cls(**{**data, **lists})


@dataclass(frozen=True)
class HostRequest:
    """Request for a host's plan, the same for all hosts.

    ``allocator`` and ``openmp`` are values of the settings ``cpu.allocator`` and ``cpu.openmp``.
    """

    binding: BindingRequest = BindingRequest()
    allocator: str = "auto"
    openmp: str = "auto"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the keys that a plan also has."""
        libraries = {"allocator": self.allocator, "openmp": self.openmp}
        return {"binding": self.binding.to_json(), "libraries": libraries}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostRequest:
        """Undo `to_json`."""
        return cls(BindingRequest.from_json(data["binding"]), **data["libraries"])
