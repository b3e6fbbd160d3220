"""The part of the plan that agents need, and its encoding in environment variables.

Hosts with the same plan share an entry, so a thousand hosts take only a few kilobytes more than one.  A text
that is too long for one variable is compressed and, if necessary, continued in further variables.

The classes are named tuples because importing ``dataclasses`` would cost every agent 6 ms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cpulaunch import variables
from cpulaunch.errors import HostError, PlanError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.names import INSTANCE, RANKS, Names

VERSION = 3
"""Version of the encoding.  An agent that expects another version reports an error and ends."""

MAX_PART = 120 * 1024
"""Maximum bytes of one variable's value.  Linux limits name and value to 128 KiB (MAX_ARG_STRLEN)."""

NUMBER = "{instance}"
"""Placeholder for an instance's number in its arguments."""


class IdentityVariables(NamedTuple):
    """Names of the variables in which a launcher passes a process its rank."""

    rank: str
    size: str
    local_rank: str
    local_size: str = ""  # number of ranks on the host; empty if the launcher has no such variable


class RankPlan(NamedTuple):
    """The plan of one rank of a host."""

    local_rank: int
    cores: CoreSet  # CPUs for computation
    comm_cores: CoreSet  # CPUs for communication
    numa_nodes: CoreSet
    threads: int  # of OpenMP
    places: tuple[CoreSet, ...] = ()  # CPUs of each compute core, from `bind`; `plan_host` moves them to env
    memory_policy: str = ""  # in the kernel's notation, such as prefer:1; empty for the kernel's default
    env: Mapping[str, str] = {}

    def to_json(self) -> dict[str, Any]:
        """Return JSON data without the local rank; core lists are folded, such as ``0-13,28``."""
        return {
            "cores": str(self.cores),
            "comm_cores": str(self.comm_cores),
            "numa_nodes": str(self.numa_nodes),
            "threads": self.threads,
            "memory_policy": self.memory_policy,
            "env": self.env,
        }

    @classmethod
    def from_json(cls, local_rank: int, raw: Mapping[str, Any]) -> RankPlan:
        """Undo `to_json`."""
        cores, comm_cores, nodes = (
            CoreSet.parse(raw[name]) for name in ("cores", "comm_cores", "numa_nodes")
        )
        return cls(local_rank, cores, comm_cores, nodes, raw["threads"], (), raw["memory_policy"], raw["env"])


class HostPlan(NamedTuple):
    """The plan of one host, whose ranks are consecutive.  Agents receive only the first four fields."""

    host: str
    assumed: bool  # the topology is that of another host, so the host's agents plan it again
    env: Mapping[str, str]  # variables of all its ranks
    ranks: tuple[RankPlan, ...]
    allocator: str = ""
    why_allocator: str = ""
    openmp: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON data without the host's name."""
        return {"assumed": self.assumed, "env": self.env, "ranks": [rank.to_json() for rank in self.ranks]}

    @classmethod
    def from_json(cls, host: str, raw: Mapping[str, Any]) -> HostPlan:
        """Undo `to_json`, for the host called ``host``."""
        ranks = tuple(RankPlan.from_json(number, rank) for number, rank in enumerate(raw["ranks"]))
        return cls(host, raw["assumed"], raw["env"], ranks)


class Placement(NamedTuple):
    """The part of the plan that agents need."""

    launcher: str  # the launcher's name
    identity: IdentityVariables
    agents_are_children: bool  # of the launcher's process
    daemon_outlives_link: bool  # the agents' parent on each host survives the loss of its network
    python: bool  # the program is a Python script or module
    directory: str  # the program's working directory
    hosts: Sequence[HostPlan]  # in the order of ranks
    request: Mapping[str, Any]  # `HostRequest` as JSON data, for hosts that agents plan again
    env: Mapping[str, str]  # variables that must not appear in argument lists
    hidden: Sequence[str]  # names of variables that are removed from the program's environment
    heartbeat_timeout: float  # seconds
    grace_period: float  # seconds
    lenient: bool
    telemetry: bool  # whether agents send telemetry of steps
    stdin: int = 0  # the rank that reads stdin
    instances: int = 0  # the number of all instances; 0 if there are ranks
    first_instance: int = 0  # the number of the instance that rank 0 stands for
    each: Sequence[Sequence[str]] = ()  # further arguments of each instance; empty without ``--each``

    @property
    def names(self) -> Names:
        """How messages call the plan's programs."""
        return Names(INSTANCE, self.first_instance) if self.instances else RANKS

    def to_variables(self) -> dict[str, str]:
        """Encode as environment variables.  Raises PlanError if the plan is too large for all of them."""
        text = self._to_json()
        if len(text) > MAX_PART:
            text = _compressed(text)
        parts = [text[start : start + MAX_PART] for start in range(0, len(text), MAX_PART)]
        if len(parts) > len(variables.PLACEMENT):
            raise PlanError(
                f"the plan of {len(self.hosts)} hosts takes {len(text)} bytes; "
                f"agents can receive {len(variables.PLACEMENT) * MAX_PART}",
                hint="use shorter host names, or set fewer variables in env:",
            )
        return dict(zip(variables.PLACEMENT, parts, strict=False))

    def _to_json(self) -> str:
        raw: dict[str, Any] = {"version": VERSION}
        for name, value in self._asdict().items():
            if name == "hosts":
                raw["hosts"], raw["host_specs"] = _folded(self.hosts)
            else:
                raw[name] = value
        return json.dumps(raw, separators=(",", ":"))

    @classmethod
    def from_variables(cls, environ: Mapping[str, str]) -> Placement:
        """Undo `to_variables`.  Raises HostError if a part is missing, or if the version differs."""
        text = "".join(environ.get(name, "") for name in variables.PLACEMENT)
        try:
            raw = json.loads(text if text.startswith("{") else _decompressed(text))
        except ValueError:
            raise HostError(
                "it received an incomplete plan from the launcher",
                hint="does something between mpiexec and this process clear the environment?",
            ) from None
        if (version := raw.pop("version", None)) != VERSION:
            raise HostError(
                f"the launcher's plan has version {version}, and this agent reads version {VERSION}",
                hint="install the same cpulaunch on all hosts",
            )
        raw["identity"] = IdentityVariables(*raw["identity"])
        like = [HostPlan.from_json("", host)[1:4] for host in raw.pop("host_specs")]
        raw["hosts"] = [HostPlan(name, *like[number]) for name, number in raw["hosts"]]
        raw["each"] = tuple(map(tuple, raw["each"]))
        return cls(**raw)


def _folded(hosts: Sequence[HostPlan]) -> tuple[list[tuple[str, int]], list[dict[str, Any]]]:
    """Return (host, index) pairs and the list of different host plans to which the indices refer."""
    numbers: dict[object, int] = {}
    named: list[tuple[str, int]] = []
    different: list[dict[str, Any]] = []
    for host in hosts:
        ranks = tuple((*rank[:-1], tuple(rank.env.items())) for rank in host.ranks)
        number = numbers.setdefault((host.assumed, tuple(host.env.items()), ranks), len(different))
        if number == len(different):
            different.append(host.to_json())
        named.append((host.host, number))
    return named, different


def _compressed(text: str) -> str:
    import base64  # rarely needed
    import zlib

    return base64.b64encode(zlib.compress(text.encode())).decode()


def _decompressed(text: str) -> bytes:
    """Undo the compression.  Raises ValueError."""
    import base64
    import zlib

    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except zlib.error as e:
        raise ValueError(str(e)) from None


def guard(arguments: Sequence[str]) -> list[str]:
    """Escape arguments that mpiexec would change: a lone ``:`` ends a program there."""
    return ["\\" + a if a.lstrip("\\") == ":" else a for a in arguments]


def unguard(arguments: Sequence[str]) -> list[str]:
    """Undo ``guard``."""
    return [a[1:] if a.startswith("\\") and a.lstrip("\\") == ":" else a for a in arguments]


def own_arguments(argv: Sequence[str], own: Sequence[str], number: int) -> list[str]:
    """Return an instance's command: with its ``own`` arguments, and its number in place of NUMBER."""
    return [argv[0], *(word.replace(NUMBER, str(number)) for word in (*argv[1:], *own))]
