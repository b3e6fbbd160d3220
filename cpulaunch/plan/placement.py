"""A plan's ranks and hosts, and all that agents must know of it: one text that travels by environment.

Like hosts share a part of the text, so that a thousand like hosts cost a few kilobytes more than one.
A text that is too long for one variable is compressed, and goes on in the next variables where need be.
Named tuples, not dataclasses: those would cost every agent 6 ms at its start.
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
"""Of the text.  It changes with any field, so that an agent of another cpulaunch says so and ends."""

MAX_PART = 120 * 1024
"""Bytes of it that one variable takes.  With its name it may have 128 KiB (execve(2), MAX_ARG_STRLEN)."""


NUMBER = "{instance}"
"""What stands for an instance's number in its arguments."""


class IdentityVariables(NamedTuple):
    """The names of the variables by which a launcher tells a process who it is.

    ``local_size`` is empty where the launcher doesn't tell the number of ranks on the host.
    """

    rank: str
    size: str
    local_rank: str
    local_size: str = ""


class RankPlan(NamedTuple):
    """One rank of a host: its CPUs, as `bind` gives them, and what `plan_host` adds for its program.

    ``cores`` are for its computation, ``comm_cores`` for oneCCL's workers.  ``threads`` are OpenMP's: the
    number of physical compute cores, unless a CPU quota or the user says otherwise.  ``places`` are the CPUs
    of each of these cores, empty where other ranks may be on them, too, and once ``env`` has them.
    ``memory_policy`` is in the kernel's words, such as ``prefer:1``; empty where the kernel's default stays.
    """

    local_rank: int
    cores: CoreSet
    comm_cores: CoreSet
    numa_nodes: CoreSet
    threads: int
    places: tuple[CoreSet, ...] = ()
    memory_policy: str = ""
    env: Mapping[str, str] = {}

    def to_json(self) -> dict[str, Any]:
        """As plain data, without its number; core lists are folded, such as ``0-13,28``."""
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
        """What `to_json` gave."""
        cores, comm_cores, nodes = (
            CoreSet.parse(raw[name]) for name in ("cores", "comm_cores", "numa_nodes")
        )
        return cls(local_rank, cores, comm_cores, nodes, raw["threads"], (), raw["memory_policy"], raw["env"])


class HostPlan(NamedTuple):
    """One host and its ranks, which are contiguous.

    ``assumed``: its topology is that of another host, so its agents plan it anew.  ``env`` is what its ranks
    share.  ``allocator`` and ``openmp`` are the libraries that they get, and ``notes`` are on these; agents
    aren't told them.
    """

    host: str
    assumed: bool
    env: Mapping[str, str]
    ranks: tuple[RankPlan, ...]
    allocator: str = ""
    why_allocator: str = ""
    openmp: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain data, without its name: what like hosts have in common."""
        return {"assumed": self.assumed, "env": self.env, "ranks": [rank.to_json() for rank in self.ranks]}

    @classmethod
    def from_json(cls, host: str, raw: Mapping[str, Any]) -> HostPlan:
        """What `to_json` gave, of the host called ``host``."""
        ranks = tuple(RankPlan.from_json(number, rank) for number, rank in enumerate(raw["ranks"]))
        return cls(host, raw["assumed"], raw["env"], ranks)


class Placement(NamedTuple):
    """All that an agent must know of the plan.

    ``launcher`` is its name, ``identity`` the variables by which it tells a process who it is.
    ``agents_are_children``: cpulaunch itself is the agents' parent.  ``daemon_outlives_link``: the launcher's
    daemon, which is the agents' parent on each host, stays when the network to it is cut.
    ``python``: the program is a Python script or module.  ``directory`` is where it is started.
    ``hosts`` are in the order of ranks.  ``request`` is what an assumed host is planned by
    (`plan.request.HostRequest`, as JSON data).  ``env`` are variables that must not show
    in argument lists; ``hidden`` are names that the program doesn't get.  ``telemetry``: the launcher
    wants to know what steps take.  ``stdin`` is the rank that has the agents' stdin.  Periods are in seconds.

    ``instances``: so many independent programs in all, of which rank 0 is number ``first_instance``; 0 where
    there are ranks.  ``each`` are the ranks' further arguments, or nothing.
    """

    launcher: str
    identity: IdentityVariables
    agents_are_children: bool
    daemon_outlives_link: bool
    python: bool
    directory: str
    hosts: Sequence[HostPlan]
    request: Mapping[str, Any]
    env: Mapping[str, str]
    hidden: Sequence[str]
    heartbeat_timeout: float
    grace_period: float
    lenient: bool
    telemetry: bool
    stdin: int = 0
    instances: int = 0
    first_instance: int = 0
    each: Sequence[Sequence[str]] = ()

    @property
    def names(self) -> Names:
        """What its programs are called."""
        return Names(INSTANCE, self.first_instance) if self.instances else RANKS

    def to_variables(self) -> dict[str, str]:
        """As environment variables.  Raises PlanError where it doesn't fit into all of them."""
        text = self._to_json()
        if len(text) > MAX_PART:
            text = _compressed(text)
        parts = [text[start : start + MAX_PART] for start in range(0, len(text), MAX_PART)]
        if len(parts) > len(variables.PLACEMENT):
            raise PlanError(
                f"the plan of {len(self.hosts)} hosts takes {len(text)} bytes; "
                f"agents can be told {len(variables.PLACEMENT) * MAX_PART}",
                hint="shorter host names, or fewer values in env:, make it smaller",
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
        """Raises HostError where it isn't whole, or another version of cpulaunch has written it."""
        text = "".join(environ.get(name, "") for name in variables.PLACEMENT)
        try:
            raw = json.loads(text if text.startswith("{") else _decompressed(text))
        except ValueError:
            raise HostError(
                "the launcher's plan hasn't reached it whole",
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
    """Each host's name with an index into the second list, in which like hosts share an entry."""
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
    import base64  # for a plan of very many hosts that differ, alone
    import zlib

    return base64.b64encode(zlib.compress(text.encode())).decode()


def _decompressed(text: str) -> bytes:
    """Raises ValueError."""
    import base64
    import zlib

    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except zlib.error as e:
        raise ValueError(str(e)) from None


def guard(arguments: Sequence[str]) -> list[str]:
    """The arguments in a form that mpiexec hands on unchanged: to it, a lone ``:`` ends a program."""
    return ["\\" + a if a.lstrip("\\") == ":" else a for a in arguments]


def unguard(arguments: Sequence[str]) -> list[str]:
    """What ``guard`` was given."""
    return [a[1:] if a.startswith("\\") and a.lstrip("\\") == ":" else a for a in arguments]


def own_arguments(argv: Sequence[str], own: Sequence[str], number: int) -> list[str]:
    """An instance's command: with arguments of its ``own``, and its number where they name it."""
    return [argv[0], *(word.replace(NUMBER, str(number)) for word in (*argv[1:], *own))]
