"""The plan as the agents need it: one text, the same for all ranks, that travels by environment.

Hosts with the same specification share one, so that a thousand like hosts cost a few kilobytes more than one.
A text that is too long for one variable is compressed, and goes on in the next variables where need be.
Named tuples, not dataclasses: those would cost every agent 6 ms at its start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cpulaunch import variables
from cpulaunch.errors import HostError, PlanError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.names import INSTANCE, RANKS, Names

if TYPE_CHECKING:
    from cpulaunch.plan.plan import HostPlan

VERSION = 2
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


class RankSpec(NamedTuple):
    """What an agent must know of one local rank; the fields are those of `plan.plan.RankPlan`."""

    cores: CoreSet
    comm_cores: CoreSet
    numa_nodes: CoreSet
    threads: int
    memory_policy: str
    env: Mapping[str, str]


class HostSpec(NamedTuple):
    """A host's ranks, and the variables that they share.

    ``assumed``: the planner did not know that host, so its agents plan it anew.
    """

    assumed: bool
    env: Mapping[str, str]
    ranks: Sequence[RankSpec]

    @classmethod
    def of(cls, host: HostPlan) -> HostSpec:
        """What the agents must know of a host's plan."""
        ranks = [
            RankSpec(r.cores, r.comm_cores, r.numa_nodes, r.threads, r.memory_policy, r.env)
            for r in host.ranks
        ]
        return cls(host.assumed, host.env, ranks)


class Placement(NamedTuple):
    """All that an agent must know of the plan.

    ``launcher`` is its name, ``identity`` the variables by which it tells a process who it is.
    ``agents_are_children``: cpulaunch itself is the agents' parent.  ``daemon_outlives_link``: the launcher's
    daemon, which is the agents' parent on each host, stays when the network to it is cut.
    ``python``: the program is a Python script or module.  ``directory`` is where it is started.
    ``hosts`` are (name, index into ``host_specs``) in the order of ranks.  ``request`` is what an assumed
    host is planned by (`plan.request.HostRequest`, as JSON data).  ``env`` are variables that must not show
    in argument lists; ``hidden`` are names that the program doesn't get.  ``telemetry``: the launcher
    wants to know what steps take.  Periods are in seconds.

    ``instances``: so many independent programs in all, of which rank 0 is number ``first_instance``; 0 where
    there are ranks.  ``each`` are the ranks' further arguments, or nothing.
    """

    launcher: str
    identity: IdentityVariables
    agents_are_children: bool
    daemon_outlives_link: bool
    python: bool
    directory: str
    hosts: Sequence[tuple[str, int]]
    host_specs: Sequence[HostSpec]
    request: Mapping[str, Any]
    env: Mapping[str, str]
    hidden: Sequence[str]
    heartbeat_timeout: float
    grace_period: float
    lenient: bool
    telemetry: bool
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
        raw = {"version": VERSION, **self._asdict()}
        raw["host_specs"] = [
            {**spec._asdict(), "ranks": [rank._asdict() for rank in spec.ranks]} for spec in self.host_specs
        ]
        return json.dumps(raw, separators=(",", ":"), default=str)  # of our values, only CoreSets need str()

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
        raw["hosts"] = [(name, spec) for name, spec in raw["hosts"]]
        raw["host_specs"] = [
            HostSpec(spec["assumed"], spec["env"], [_rank_spec(**rank) for rank in spec["ranks"]])
            for spec in raw["host_specs"]
        ]
        raw["each"] = tuple(map(tuple, raw["each"]))
        return cls(**raw)


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


def _rank_spec(cores: str, comm_cores: str, numa_nodes: str, **others: Any) -> RankSpec:
    return RankSpec(CoreSet.parse(cores), CoreSet.parse(comm_cores), CoreSet.parse(numa_nodes), **others)


def guard(arguments: Sequence[str]) -> list[str]:
    """The arguments in a form that mpiexec hands on unchanged: to it, a lone ``:`` ends a program."""
    return ["\\" + a if a.lstrip("\\") == ":" else a for a in arguments]


def unguard(arguments: Sequence[str]) -> list[str]:
    """What ``guard`` was given."""
    return [a[1:] if a.startswith("\\") and a.lstrip("\\") == ":" else a for a in arguments]


def own_arguments(argv: Sequence[str], own: Sequence[str], number: int) -> list[str]:
    """An instance's command: with arguments of its ``own``, and its number where they name it."""
    return [argv[0], *(word.replace(NUMBER, str(number)) for word in (*argv[1:], *own))]
