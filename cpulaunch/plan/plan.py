"""The plan: where each rank runs, in which environment, started by what.  Values, with a JSON round trip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.names import INSTANCE, RANKS, Names
from cpulaunch.model.network import Interface
from cpulaunch.plan.request import HostRequest

SCHEMA = 1


@dataclass(frozen=True)
class Program:
    """What every rank runs, and in which directory.

    ``python``: ``argv`` is an interpreter, and a script or ``-m module`` with their arguments.
    ``interpreter`` is what runs the agents.  Paths are absolute.  ``each``: further arguments for each
    instance, in their order; empty where all get the same.
    """

    argv: tuple[str, ...]
    python: bool
    directory: str
    interpreter: str
    each: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Instances:
    """How many instances there are in all, and the plan's first: not 0 where that is the only one to run."""

    count: int
    first: int = 0


@dataclass(frozen=True)
class RankPlan:
    """One rank.  ``threads`` are OpenMP's.

    ``memory_policy`` is in the kernel's words, such as ``prefer:1``; empty where the kernel's default stays.
    """

    rank: int
    local_rank: int
    cores: CoreSet
    comm_cores: CoreSet
    numa_nodes: CoreSet
    threads: int
    memory_policy: str
    env: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """As plain data; core lists are folded, such as ``0-13,28``."""
        raw = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: str(value) if isinstance(value, CoreSet) else value for name, value in raw.items()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RankPlan:
        """What ``to_json`` gave."""
        cores = {name: CoreSet.parse(raw[name]) for name in ("cores", "comm_cores", "numa_nodes")}
        return cls(**{**raw, **cores})


@dataclass(frozen=True)
class HostPlan:
    """One host and its ranks, which are contiguous.  ``assumed``: its topology is that of another host.

    ``allocator`` and ``openmp`` are the libraries that its ranks get, and ``notes`` are on these; the plan's
    JSON has them in its settings, ``allocator`` and notes.
    """

    host: str
    assumed: bool
    env: Mapping[str, str]
    ranks: tuple[RankPlan, ...]
    allocator: str = field(default="", compare=False)
    why_allocator: str = field(default="", compare=False)
    openmp: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        ranks = [rank.to_json() for rank in self.ranks]
        return {"host": self.host, "assumed": self.assumed, "env": dict(self.env), "ranks": ranks}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> HostPlan:
        """What ``to_json`` gave."""
        return cls(raw["host"], raw["assumed"], raw["env"], tuple(map(RankPlan.from_json, raw["ranks"])))


# The document's names are part of the interface; within the program, a launcher is a launcher.
_JSON_NAMES = {"launcher_setting": "launcher", "launcher": "starter"}
_NESTED = ("hosts", "request", "program", "egress_interface", "instances")
_ONLY_IF_THERE = ("instances", "each")  # what most plans don't have


@dataclass(frozen=True)
class Plan:
    """Everything about a job but what differs at each start.

    ``launcher`` is the name of the launcher that starts the ranks; ``launcher_setting`` is the setting's
    value, which may stand for several.  ``transport``, of `decide_transport`, carries ccl's collectives; it
    is empty with another backend.  ``allocator`` says which allocator the hosts' ranks get, and why.
    ``env`` reaches every rank; ``private`` are those of its names that must not show in argument lists;
    ``forward`` are names of the user's own variables that the launcher has to hand on.  ``hidden`` are names
    that no rank gets: they would tell it that it is another rank.
    ``here_alone``: the job stays on the host that it is started from.
    ``request`` is what every host was planned by.  ``settings`` are rows of key, value and origin.
    ``egress_interface`` is the launching host's interface to the others, where it is known.
    ``user_mpi_variables`` are names of variables by which the user has told mpiexec how to reach hosts.
    ``instances``: the plan's ranks are independent programs.
    """

    launcher_setting: str
    launcher: str
    world_size: int
    master_addr: str
    transport: str
    allocator: str
    hosts: tuple[HostPlan, ...]
    here_alone: bool
    env: Mapping[str, str]
    private: tuple[str, ...]
    forward: tuple[str, ...]
    hidden: tuple[str, ...]
    program: Program
    mpiexec: str
    mpi_args: tuple[str, ...]
    request: HostRequest
    settings: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()
    egress_interface: Interface | None = None
    user_mpi_variables: tuple[str, ...] = ()
    instances: Instances | None = None

    @property
    def names(self) -> Names:
        """What its programs are called."""
        return Names(INSTANCE, self.instances.first) if self.instances else RANKS

    @property
    def noun(self) -> str:
        """What one of its programs is called."""
        return self.names.noun

    def setting(self, key: str) -> Any:
        """The value of a setting by its key."""
        return next(row["value"] for row in self.settings if row["key"] == key)

    def to_json(self) -> dict[str, Any]:
        """The document of ``--dry-run --format json``, without its ``commands``."""
        document: dict[str, Any] = {"schema": SCHEMA}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "request":
                document.update(value.to_json())
            elif f.name == "hosts":
                document["hosts"] = [host.to_json() for host in value]
            elif f.name != "program":
                document[_JSON_NAMES.get(f.name, f.name)] = (
                    asdict(value) if isinstance(value, Interface | Instances) else value
                )
        program = asdict(self.program)
        document.update({"program": program.pop("argv"), **program})
        return {name: value for name, value in document.items() if value or name not in _ONLY_IF_THERE}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Plan:
        """What ``to_json`` gave."""
        if document.get("schema") != SCHEMA:
            raise ConfigError(f"not a plan of schema {SCHEMA}: {document.get('schema')!r}")
        raw = {
            name: document[_JSON_NAMES.get(name, name)]
            for name in cls.__dataclass_fields__
            if name not in _NESTED
        }
        for name in ("private", "forward", "hidden", "mpi_args", "settings", "notes", "user_mpi_variables"):
            raw[name] = tuple(document[name])
        raw["hosts"] = tuple(map(HostPlan.from_json, document["hosts"]))
        raw["request"] = HostRequest.from_json(document)
        raw["program"] = Program(
            tuple(document["program"]),
            document["python"],
            document["directory"],
            document["interpreter"],
            tuple(map(tuple, document.get("each", ()))),
        )
        raw["instances"] = Instances(**document["instances"]) if "instances" in document else None
        interface = document["egress_interface"]
        raw["egress_interface"] = Interface(**interface) if interface else None
        return cls(**raw)
