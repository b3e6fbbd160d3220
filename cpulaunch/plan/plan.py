"""The plan: who sits where, in which environment, started by what.  Plain values, with a JSON round trip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cpulaunch.errors import ConfigError
from cpulaunch.model.network import Interface

SCHEMA = 1
LOCALHOST = "localhost"
"""The host of a plan for this machine alone."""


@dataclass(frozen=True)
class Program:
    """What every rank runs, and in which directory.

    ``python``: ``argv`` is an interpreter, and a script or ``-m module`` with their arguments.
    ``interpreter`` is what runs the agents.  Paths are absolute.
    """

    argv: tuple[str, ...]
    python: bool
    directory: str
    interpreter: str


@dataclass(frozen=True)
class RankPlan:
    """One rank.  Core lists are folded, such as ``0-13,28``; ``threads`` are OpenMP's.

    ``memory_policy`` is in the kernel's words, such as ``prefer:1``; empty where the kernel's default stays.
    """

    rank: int
    local_rank: int
    cores: str
    comm_cores: str
    numa_nodes: str
    threads: int
    memory_policy: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class HostPlan:
    """One host and its ranks, which are contiguous.  ``assumed``: nobody looked at its topology."""

    host: str
    assumed: bool
    env: Mapping[str, str]
    ranks: tuple[RankPlan, ...]


@dataclass(frozen=True)
class Plan:
    """Everything about a job but what differs at each start.

    ``env`` reaches every rank; ``private`` are those of its names that must not show in argument
    lists; ``forward`` are names of the launcher's own variables that the starter has to be told of.
    ``binding`` is the request that was bound by, ``libraries`` the ``allocator`` and the ``openmp`` runtime
    that were asked for.  ``settings`` are rows of key, value and origin.
    ``way_out`` is the launching host's interface to the others, where it is known.  ``said_to_mpi`` are
    names of variables by which the user has told mpiexec how to reach hosts.
    """

    launcher: str
    starter: str
    world_size: int
    master_addr: str
    hosts: tuple[HostPlan, ...]
    env: Mapping[str, str]
    private: tuple[str, ...]
    forward: tuple[str, ...]
    program: Program
    mpiexec: str
    mpi_args: tuple[str, ...]
    binding: Mapping[str, Any]
    libraries: Mapping[str, str]
    settings: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()
    way_out: Interface | None = None
    said_to_mpi: tuple[str, ...] = ()

    def setting(self, key: str) -> Any:
        """The value of a setting by its key."""
        return next(row["value"] for row in self.settings if row["key"] == key)

    @property
    def here_alone(self) -> bool:
        """Whether the job stays on the machine that it is started from."""
        return len(self.hosts) == 1 and self.hosts[0].host == LOCALHOST

    def to_json(self) -> dict[str, Any]:
        """The document of ``--dry-run --format json``, without its ``commands``."""
        document: dict[str, Any] = {"schema": SCHEMA, **asdict(self)}
        program = document.pop("program")
        return {**document, "program": program.pop("argv"), **program}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Plan:
        """What ``to_json`` gave."""
        if document.get("schema") != SCHEMA:
            raise ConfigError(f"not a plan of schema {SCHEMA}: {document.get('schema')!r}")
        raw = {k: v for k, v in document.items() if k in cls.__dataclass_fields__}
        raw["program"] = Program(
            tuple(document["program"]), document["python"], document["directory"], document["interpreter"]
        )
        raw["hosts"] = tuple(
            HostPlan(h["host"], h["assumed"], h["env"], tuple(RankPlan(**r) for r in h["ranks"]))
            for h in document["hosts"]
        )
        for name in ("private", "forward", "mpi_args", "settings", "notes", "said_to_mpi"):
            raw[name] = tuple(document[name])
        raw["way_out"] = Interface(**document["way_out"]) if document["way_out"] else None
        return cls(**raw)
