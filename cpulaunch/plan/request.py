"""Requests that are the same for every host of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from cpulaunch.model.cores import CoreSet


@dataclass(frozen=True)
class BindingRequest:
    """Request for the placement on one host; the defaults are those of the command line."""

    ranks: int | None = None  # None: `binding._default_ranks` decides
    cores_per_rank: int | Literal["auto", "max"] = "auto"  # physical; max: leftover cores are used, too
    cores: CoreSet | None = None  # use only these CPUs
    numa_nodes: CoreSet | None = None  # use only these nodes
    bind_numa: bool = False  # each rank stays within one NUMA node
    logical_cores: bool = False  # ranks also get their cores' hyperthread siblings
    e_cores: bool = False  # use E-cores like other cores
    strategy: Literal["scatter", "close", "none"] = "scatter"  # none: ranks are not pinned
    worker_count: int | Literal["auto"] = "auto"  # communication threads per rank
    ccl_logical_cores: bool = False  # communication runs on hyperthread siblings
    dedicate_workers: bool = True  # ranks set cores aside for communication
    oversubscribe: bool = False  # ranks may share cores
    threads: int | Literal["auto"] = "auto"  # OpenMP threads per rank
    instances: bool = False  # the ranks are instances

    @property
    def noun(self) -> str:
        """``rank`` or ``instance``."""
        return "instance" if self.instances else "rank"

    def to_json(self) -> dict[str, Any]:
        """Return JSON data without default values."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {key: str(value) if isinstance(value, CoreSet) else value for key, value in data.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BindingRequest:
        """Undo `to_json`."""
        lists = {key: CoreSet.parse(data[key]) for key in ("cores", "numa_nodes") if key in data}
        return cls(**{**data, **lists})


@dataclass(frozen=True)
class HostRequest:
    """A request to plan one host.  Every host gets the same request.

    ``allocator`` and ``openmp`` are values of the settings ``cpu.allocator`` and ``cpu.openmp``.
    """

    binding: BindingRequest = BindingRequest()
    allocator: str = "auto"
    openmp: str = "auto"

    def to_json(self) -> dict[str, Any]:
        """Return JSON data, with the keys of a plan."""
        libraries = {"allocator": self.allocator, "openmp": self.openmp}
        return {"binding": self.binding.to_json(), "libraries": libraries}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostRequest:
        """Undo `to_json`."""
        return cls(BindingRequest.from_json(data["binding"]), **data["libraries"])
