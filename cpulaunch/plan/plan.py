"""A job's plan: the cores and the environment of each rank, and the launcher that starts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from cpulaunch.model.cores import CoreSet
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
    """The command that every rank runs.  Paths are absolute."""

    argv: tuple[str, ...]
    python: bool  # argv is an interpreter with a script or ``-m module``
    directory: str  # the working directory
    interpreter: str  # the Python that runs the agents
    each: tuple[tuple[str, ...], ...] = ()  # further arguments of each instance; empty if all get the same


@dataclass(frozen=True)
class Instances:
    """The instances of a job: how many there are, and the number of the first one in the plan."""

    count: int
    first: int = 0  # K if only instance K runs


# Names of fields in the JSON document, which is an interface.
_JSON_NAMES = {"launcher_setting": "launcher", "launcher": "starter"}
_OMITTED_IF_EMPTY = ("instances", "each", "here", "launcher_why", "left_out")


@dataclass(frozen=True)
class Plan:
    """A job's plan.  All attempts of the job can use it: job id, token and port are chosen at each start."""

    launcher_setting: str  # value of the setting ``launcher``, such as mpirun
    launcher: str  # name of the launcher that starts the ranks, such as intel
    world_size: int
    master_addr: str
    transport: str  # of ccl's collectives (`decide_transport`); empty with another backend
    allocator: str  # allocators of the hosts' ranks, with the reasons
    hosts: tuple[HostPlan, ...]
    here_alone: bool  # all ranks run on the launching host
    env: Mapping[str, str]  # variables of every rank
    private: tuple[str, ...]  # names in ``env`` that must not appear in argument lists
    forward: tuple[str, ...]  # names of the user's variables that the launcher must pass to the ranks
    hidden: tuple[str, ...]  # names of variables that ranks must not get: they identify another rank
    program: Program
    mpiexec: str
    mpi_args: tuple[str, ...]
    request: HostRequest
    precision: PrecisionDecision
    settings: Settings
    found: Mapping[Setting[Any], Any]  # detected values of settings, in JSON types; a list if hosts differ
    launcher_why: str = ""  # `LauncherDecision.why`
    notes: tuple[str, ...] = ()
    egress_interface: Interface | None = None  # the launching host's interface towards the other hosts
    here: tuple[str, ...] = ()  # names of the launching host among those of ``hosts``
    user_mpi_variables: tuple[str, ...] = ()  # names of the user's variables that configure mpiexec
    left_out: tuple[str, ...] = ()  # names of the user's variables that are hidden from mpiexec
    instances: Instances | None = None  # set if the ranks are independent programs

    @property
    def names(self) -> Names:
        """How messages call the plan's programs."""
        return Names(INSTANCE, self.instances.first) if self.instances else RANKS

    @property
    def noun(self) -> str:
        """``rank`` or ``instance``."""
        return self.names.noun

    @property
    def pinned_here(self) -> CoreSet:
        """The CPUs that the ranks are pinned to; empty if some run on other hosts, or none is pinned."""
        if not self.here_alone or self.settings.cpu.strategy == "none":
            return CoreSet()
        ranks = (rank for host in self.hosts for rank in host.ranks)
        return CoreSet(cpu for rank in ranks for cpu in rank.cores | rank.comm_cores)

    def setting_rows(self) -> Iterator[SettingRow]:
        """Yield every setting with its detected value."""
        return self.settings.rows(self.found)

    def _hosts_as_json(self) -> Iterator[dict[str, Any]]:
        """Yield each host as JSON data, with its name and its ranks' numbers."""
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
        return {name: value for name, value in document.items() if value or name not in _OMITTED_IF_EMPTY}
