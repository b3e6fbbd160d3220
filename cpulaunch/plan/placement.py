"""A plan's ranks and hosts, and everything else that agents need: one text that travels by environment.

Like hosts share a part of the text, so a thousand like hosts cost only a few kilobytes more than one.
A text that is too long for one variable is compressed and, if necessary, continued in further variables.
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
"""Version of the text.  It changes with any field, so an agent of another cpulaunch reports it and ends."""

MAX_PART = 120 * 1024
"""Maximum bytes of the text in one variable, which with its name is limited to 128 KiB (execve(2),
MAX_ARG_STRLEN)."""


NUMBER = "{instance}"
"""Placeholder for an instance's number in its arguments."""


class IdentityVariables(NamedTuple):
    """Names of the variables by which a launcher identifies a process.

    ``local_size`` is empty if the launcher doesn't give the number of ranks on the host.
    """

    rank: str
    size: str
    local_rank: str
    local_size: str = ""


class RankPlan(NamedTuple):
    """One rank of a host: its CPUs, from `bind`, and what `plan_host` adds for its program.

    ``cores`` are for its computation, ``comm_cores`` for communication.  ``threads`` is OpenMP's number:
    that of physical compute cores, unless a CPU quota or the user says otherwise.  ``places`` are the CPUs of
    each of these cores; empty if other ranks may also use them, and once ``env`` contains them.
    ``memory_policy`` is in the kernel's notation, such as ``prefer:1``; empty for the kernel's default.
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
        """Return plain data, without the number; core lists are folded, such as ``0-13,28``."""
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
    """One host and its ranks, which are contiguous.

    ``assumed``: its topology is that of another host, so its agents plan it anew.  ``env`` is shared by its
    ranks.  ``allocator`` and ``openmp`` are the libraries that they get, and ``notes`` are about these;
    agents don't receive them.
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
        """Return plain data, without the name: what like hosts have in common."""
        return {"assumed": self.assumed, "env": self.env, "ranks": [rank.to_json() for rank in self.ranks]}

    @classmethod
    def from_json(cls, host: str, raw: Mapping[str, Any]) -> HostPlan:
        """Undo `to_json`, for the host called ``host``."""
        ranks = tuple(RankPlan.from_json(number, rank) for number, rank in enumerate(raw["ranks"]))
        return cls(host, raw["assumed"], raw["env"], ranks)


class Placement(NamedTuple):
    """Everything that an agent must know of the plan.

    ``launcher`` is the launcher's name, ``identity`` the variables by which it identifies a process.
    ``agents_are_children``: cpulaunch itself is the agents' parent.  ``daemon_outlives_link``: the launcher's
    daemon, the agents' parent on each host, stays when the network to it is cut.
    ``python``: the program is a Python script or module.  ``directory`` is where it is started.
    ``hosts`` are in the order of ranks.  ``request`` is what an assumed host is planned by
    (`plan.request.HostRequest`, as JSON data).  ``env`` are variables that must not appear in argument lists;
    ``hidden`` are names that the program doesn't get.  ``telemetry``: the launcher wants telemetry of steps.
    ``stdin`` is the rank that gets the agents' stdin.  Periods are in seconds.

    ``instances``: the number of independent programs in all, the first of which, rank 0, is number
    ``first_instance``; 0 if there are ranks.  ``each`` are the ranks' further arguments, or nothing.
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
        """The names of its programs."""
        return Names(INSTANCE, self.first_instance) if self.instances else RANKS

    def to_variables(self) -> dict[str, str]:
        """Return environment variables.  Raises PlanError if the text doesn't fit into all of them."""
        text = self._to_json()
        if len(text) > MAX_PART:
            text = _compressed(text)
        parts = [text[start : start + MAX_PART] for start in range(0, len(text), MAX_PART)]
        if len(parts) > len(variables.PLACEMENT):
            raise PlanError(
                f"the plan of {len(self.hosts)} hosts takes {len(text)} bytes; "
                f"agents can receive {len(variables.PLACEMENT) * MAX_PART}",
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
        """Undo `to_variables`.  Raises HostError if it isn't whole, or of another version of cpulaunch."""
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
    """Return each host's name with an index into the second list, in which like hosts share an entry."""
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
    import base64  # only for a plan of very many different hosts
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
