"""Facts about hosts, the input of planning.  A facts file has the facts of other machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cpulaunch.errors import ConfigError
from cpulaunch.model.fabrics import Fabric
from cpulaunch.model.hosts import Host
from cpulaunch.model.network import Interface
from cpulaunch.model.rates import Cpu, ProductRates
from cpulaunch.model.topology import Topology

SCHEMA = 1
BF16_FLAGS = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True)
class HostFacts:
    """Facts about one host; None means unknown.

    ``names``: all names and addresses of the host.  ``cpu_flags``: the CPU's flags that are in BF16_FLAGS, or
    ``bf16`` on Arm.  ``memory``: in bytes.  ``memory_limit``: the control group's limit in bytes, or None.
    ``interface`` and ``address``: the network interface to the other hosts.  ``libraries``: name in
    `model.libraries` → path.  ``fabrics``: fast network cards.  ``cpu``: the model of the CPUs.  ``rates``:
    measured rates of matrix products, one entry per number of threads.  ``libc``: the C library, such as
    ``glibc 2.36`` or ``musl``.
    """

    topology: Topology
    names: frozenset[str] = frozenset()
    cpu_flags: tuple[str, ...] | None = None
    memory: int | None = None
    interface: str | None = None
    address: str | None = None
    libraries: Mapping[str, str] | None = None
    fabrics: tuple[Fabric, ...] | None = None
    cpu: Cpu | None = None
    rates: tuple[ProductRates, ...] = ()
    libc: str | None = None
    memory_limit: int | None = None

    def rates_of(self, threads: int) -> ProductRates | None:
        """Return the rates measured with this number of threads, or None."""
        return next((rates for rates in self.rates if rates.threads == threads), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "topology": self.topology.to_json(),
            "names": sorted(self.names),
            "cpu_flags": None if self.cpu_flags is None else list(self.cpu_flags),
            "memory": self.memory,
            "interface": self.interface,
            "address": self.address,
            "libraries": None if self.libraries is None else dict(self.libraries),
            "fabrics": None if self.fabrics is None else [card._asdict() for card in self.fabrics],
            "cpu": None if self.cpu is None else self.cpu._asdict(),
            "rates": [rates._asdict() for rates in self.rates],
            "libc": self.libc,
            "memory_limit": self.memory_limit,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> HostFacts:
        flags = raw.get("cpu_flags")
        return cls(
            topology=Topology.from_json(raw["topology"]),
            names=frozenset(raw.get("names", ())),
            cpu_flags=None if flags is None else tuple(flags),
            memory=raw.get("memory"),
            interface=raw.get("interface"),
            address=raw.get("address"),
            libraries=_libraries(raw.get("libraries")),
            fabrics=None if raw.get("fabrics") is None else tuple(Fabric(**card) for card in raw["fabrics"]),
            cpu=None if raw.get("cpu") is None else Cpu(**raw["cpu"]),
            rates=tuple(map(ProductRates.from_json, raw.get("rates", ()))),
            libc=raw.get("libc"),
            memory_limit=raw.get("memory_limit"),
        )


def _libraries(raw: Any) -> dict[str, str] | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or not all(isinstance(path, str) for path in raw.values()):
        raise TypeError(f"libraries must map names to paths, got {raw!r}")
    return raw


@dataclass(frozen=True)
class Mpi:
    """An installed MPI: the ``path`` of its mpiexec, and the version that it reports."""

    flavour: str
    path: str
    version: str


@dataclass(frozen=True)
class Facts:
    """All facts that planning needs.

    ``listed``: the hosts that the user or the allocation named; empty if the job uses this machine alone.
    ``spares``: further hosts, which are used if others fail.
    ``hosts``: the probed or recorded hosts, by name.
    ``like``: the facts assumed for all other hosts.  ``like_what``: the name of ``like`` in messages.
    ``shares``: host → number of its CPUs that the allocation contains, if ranks are confined to them.
    ``here``: this host's names; empty if the facts describe other machines.
    ``mpis``: the MPIs installed here, the preferred one first; None if the facts describe other machines.
    ``mpis_here``: the MPIs installed here if the facts describe other machines; ``auto`` chooses among them.
    ``without_mpi``: the job's hosts that lack the first of ``mpis``; None if no host was probed.
    ``ccl_missing``: the reason why the ccl backend can't be used; None if it can.
    ``egress_interface``: this host's interface to the other hosts; None if it was not determined.
    ``free_port``: a free port on the first host; None if it was not determined.
    ``step``: whether a Slurm step can start the ranks in the allocation.
    """

    like: HostFacts
    listed: tuple[Host, ...] = ()
    spares: tuple[Host, ...] = ()
    hosts: Mapping[str, HostFacts] = field(default_factory=dict)
    shares: Mapping[str, int] = field(default_factory=dict)
    here: frozenset[str] = frozenset()
    mpis: tuple[Mpi, ...] | None = None
    without_mpi: tuple[str, ...] | None = None
    ccl_missing: str | None = None
    egress_interface: Interface | None = None
    free_port: int | None = None
    like_what: str = "this machine"
    mpis_here: tuple[Mpi, ...] = ()
    step: bool = False

    def of(self, name: str) -> tuple[HostFacts, bool]:
        """Return the facts of the host ``name``, and whether they are assumed."""
        if name in self.hosts:
            return self.hosts[name], False
        for facts in self.hosts.values():
            if name in facts.names:
                return facts, False
        if name in self.shares:
            return replace(self.like, topology=self.like.topology.first(self.shares[name])), True
        return self.like, True


def record(hosts: Mapping[str, HostFacts]) -> str:
    """Return the text of a facts file."""
    entries = {name: facts.to_json() for name, facts in hosts.items()}
    return json.dumps({"schema": SCHEMA, "hosts": entries}, indent=1) + "\n"


def read_record(text: str, shown: str) -> dict[str, HostFacts]:
    """Parse the ``text`` of a facts file.  Raises ConfigError, which calls the file ``shown``."""
    hint = "`cpulaunch hosts check --facts-out F` records one"
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ConfigError(f"{shown}: not a facts file of schema {SCHEMA}", hint=hint)
        hosts = {name: HostFacts.from_json(entry) for name, entry in raw["hosts"].items()}
    except json.JSONDecodeError as e:
        raise ConfigError(f"{shown}:{e.lineno}: not JSON: {e.msg}", hint=hint) from None
    except RecursionError:
        raise ConfigError(f"{shown}: nested too deeply", hint=hint) from None
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise ConfigError(f"{shown}: not a facts file: {e!r}", hint=hint) from None
    if not hosts:
        raise ConfigError(f"{shown}: describes no host", hint=hint)
    return hosts
