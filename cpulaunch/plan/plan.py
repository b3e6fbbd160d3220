"""The plan: each rank's place and environment, and the launcher.  Values, with JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from cpulaunch.model.names import INSTANCE, RANKS, Names
from cpulaunch.model.network import Interface
from cpulaunch.plan.placement import HostPlan
from cpulaunch.plan.request import HostRequest

if TYPE_CHECKING:  # agents, which plan a host anew, don't need settings
    from cpulaunch.config.config import SettingRow, Settings
    from cpulaunch.config.setting import Setting
    from cpulaunch.plan.training import PrecisionDecision

SCHEMA = 1


@dataclass(frozen=True)
class Program:
    """What every rank runs, and in which directory.

    ``python``: ``argv`` is an interpreter, and a script or ``-m module`` with their arguments.
    ``interpreter`` runs the agents.  Paths are absolute.  ``each``: further arguments for each instance, in
    their order; empty if all get the same.
    """

    argv: tuple[str, ...]
    python: bool
    directory: str
    interpreter: str
    each: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Instances:
    """The number of all instances, and of the plan's first one: not 0 if only that one runs."""

    count: int
    first: int = 0


# The document's names are an interface; within the program, "launcher" is the launcher that was chosen.
_JSON_NAMES = {"launcher_setting": "launcher", "launcher": "starter"}
_ONLY_IF_THERE = ("instances", "each", "here", "launcher_why", "left_out")  # most plans lack these


@dataclass(frozen=True)
class Plan:
    """A job, except for what differs at each start.

    ``launcher`` is the name of the launcher that starts the ranks.  ``launcher_setting`` is the setting's
    value, which may stand for several launchers; ``launcher_why`` is from `LauncherDecision`.
    ``transport``, from `decide_transport`, carries ccl's collectives; it is empty with another backend.
    ``allocator`` is the allocator of the hosts' ranks, with the reason.
    ``env`` reaches every rank; ``private`` are the names in it that must not appear in argument lists.
    ``forward`` are names of the user's own variables that the launcher has to pass on.
    ``hidden`` are names that no rank gets: they would identify it as another rank.
    ``here_alone``: the job stays on the host that it is started from.
    ``request`` is what every host was planned by.
    ``settings`` are those of the job.  ``found`` is what was found or decided for some of them, in the types
    of JSON: a list if it differs by host.
    ``egress_interface`` is the launching host's interface to the others, if it is known.
    ``here`` are the hosts' names that denote the launching host.
    ``user_mpi_variables`` are names of variables by which the user has configured how mpiexec reaches hosts;
    ``left_out`` are the ones among them that mpiexec doesn't get.
    ``instances``: the plan's ranks are independent programs.
    ``precision``: that of all ranks, with the reason.
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
    precision: PrecisionDecision
    settings: Settings
    found: Mapping[Setting[Any], Any]
    launcher_why: str = ""
    notes: tuple[str, ...] = ()
    egress_interface: Interface | None = None
    here: tuple[str, ...] = ()
    user_mpi_variables: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    instances: Instances | None = None

    @property
    def names(self) -> Names:
        """The names of its programs."""
        return Names(INSTANCE, self.instances.first) if self.instances else RANKS

    @property
    def noun(self) -> str:
        """The word for one of its programs."""
        return self.names.noun

    def setting_rows(self) -> Iterator[SettingRow]:
        """Yield every setting with what was found for it."""
        return self.settings.rows(self.found)

    def _hosts_as_json(self) -> Iterator[dict[str, Any]]:
        """Yield each host with its name, and with the numbers of its ranks."""
        first = 0
        for host in self.hosts:
            data = host.to_json()
            for rank, each in zip(host.ranks, data["ranks"], strict=True):
                number = {"rank": first + rank.local_rank, "local_rank": rank.local_rank}
                data["ranks"][rank.local_rank] = {**number, **each}
            yield {"host": host.host, **data}
            first += len(host.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--dry-run --format json``, without its ``commands``."""
        document: dict[str, Any] = {"schema": SCHEMA}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "request":
                document.update(value.to_json())
            elif f.name == "precision":
                document["precision"] = value.to_json()
            elif f.name == "hosts":
                document["hosts"] = list(self._hosts_as_json())
            elif f.name == "settings":
                document["settings"] = [row.to_json() for row in self.setting_rows()]
            elif f.name not in ("program", "found"):
                document[_JSON_NAMES.get(f.name, f.name)] = (
                    asdict(value) if isinstance(value, Interface | Instances) else value
                )
        program = asdict(self.program)
        document.update({"program": program.pop("argv"), **program})
        return {name: value for name, value in document.items() if value or name not in _ONLY_IF_THERE}
