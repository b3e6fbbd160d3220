"""The plan as the agents need it: one text, the same for all ranks, that travels by environment.

Hosts with the same layout share one, so that a thousand like hosts cost a few kilobytes more than one.
Named tuples, not dataclasses: those would cost every agent 6 ms at its start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cpulaunch import variables

VARIABLE = variables.PLACEMENT


class IdentityVariables(NamedTuple):
    """The variables by which a launcher tells a process who it is.

    ``local_size`` is empty where the launcher doesn't tell the number of ranks on the host.
    """

    rank: str
    size: str
    local_rank: str
    local_size: str = ""


class Place(NamedTuple):
    """One local rank's cores (folded lists), threads, memory policy, and variables of its own."""

    cores: str
    comm_cores: str
    numa_nodes: str
    threads: int
    memory_policy: str
    env: Mapping[str, str]


class Layout(NamedTuple):
    """How ranks sit on a host.  ``assumed``: nobody has looked at that host; its agents bind anew."""

    assumed: bool
    env: Mapping[str, str]
    places: Sequence[Place]


class Placement(NamedTuple):
    """All that an agent must know of the plan.

    ``hosts`` are (name, index into layouts) in the order of ranks.  ``binding`` is the request to
    bind by on assumed hosts, ``libraries`` the allocator and OpenMP runtime asked for there.
    ``env`` are variables that should not show in argument lists.  Periods are in seconds.
    """

    starter: str
    python: bool
    directory: str
    hosts: Sequence[tuple[str, int]]
    layouts: Sequence[Layout]
    binding: Mapping[str, Any]
    libraries: Mapping[str, str]
    env: Mapping[str, str]
    heartbeat_timeout: float
    grace_period: float
    lenient: bool

    def to_text(self) -> str:
        raw = self._asdict()
        raw["layouts"] = [
            {**layout._asdict(), "places": [place._asdict() for place in layout.places]}
            for layout in self.layouts
        ]
        return json.dumps(raw, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Placement:
        raw = json.loads(text)
        raw["hosts"] = [(name, layout) for name, layout in raw["hosts"]]
        raw["layouts"] = [
            Layout(entry["assumed"], entry["env"], [Place(**place) for place in entry["places"]])
            for entry in raw["layouts"]
        ]
        return cls(**raw)


def guard(arguments: Sequence[str]) -> list[str]:
    """The arguments in a form that mpiexec hands on unchanged: to it, a lone ``:`` ends a program."""
    return ["\\" + a if a.lstrip("\\") == ":" else a for a in arguments]


def unguard(arguments: Sequence[str]) -> list[str]:
    """What ``guard`` was given."""
    return [a[1:] if a.startswith("\\") and a.lstrip("\\") == ":" else a for a in arguments]
