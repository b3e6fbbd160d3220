"""Collects facts about this machine and this directory for the wizard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path

from cpulaunch import launchers, queues
from cpulaunch.discovery.batch.allocation import Allocation, allocation, read_hostfile
from cpulaunch.discovery.host.files import read_file
from cpulaunch.discovery.host.interfaces import interfaces_here
from cpulaunch.errors import CpulaunchError
from cpulaunch.model.facts import HostFacts, Mpi
from cpulaunch.model.hosts import Host, fold_hosts
from cpulaunch.plugins import ENGINE_PACKAGES
from cpulaunch.wording import counted

HOSTFILE_NAMES = ("hostfile", "hosts", "machinefile", "hostfile.txt", "hosts.txt", "hostfiles/*")
MOST_HOSTFILES = 10
"""Maximum number of hostfiles offered, to fit a small terminal."""


@dataclass(frozen=True)
class Machine:
    """Facts about this machine, for the wizard.

    ``mpis``: all MPIs, in the order of preference.  ``interfaces``: name and address of each active
    interface, without loopback.  ``allocation``: a batch system's allocation.  ``hostfiles``: readable
    hostfiles in this directory.  ``ipex``: the version of IPEX, if it is installed.  ``ccl_missing``: why ccl
    can't be used.  ``ccl_note``: a remark if ccl can be used.  ``submits``: whether jobs can be submitted to
    Slurm.
    """

    facts: HostFacts
    mpis: tuple[Mpi, ...]
    interfaces: tuple[tuple[str, str], ...]
    hostfiles: Mapping[str, tuple[Host, ...]]
    allocation: Allocation | None
    ipex: str | None
    ccl_missing: str | None
    ccl_note: str = ""
    submits: bool = False

    def mpi(self, flavour: str) -> Mpi | None:
        """Return the MPI of a flavour; for ``auto``, the preferred MPI."""
        return next((mpi for mpi in self.mpis if flavour in ("auto", mpi.flavour)), None)

    def lines(self) -> Iterator[str]:
        """Yield a line about each fact."""
        topology = self.facts.topology
        flags = "unknown" if self.facts.cpu_flags is None else " ".join(self.facts.cpu_flags) or "none"
        sizes = (counted(len(topology.sockets), "socket"), counted(len(topology.nodes), "NUMA node"),
                 counted(len(topology.cores), "core"))  # fmt: skip
        yield "CPU        " + ", ".join(sizes)
        yield "bf16       " + flags
        if self.facts.memory:
            yield f"memory     {self.facts.memory / 2**30:.0f} GiB"
        for i, mpi in enumerate(self.mpis):
            yield f"{'' if i else 'MPI':10} {launchers.load(mpi.flavour).title} {mpi.version}"
        if not self.mpis:
            yield "MPI        none found; --launcher ssh does not need one"
        missing = self.ccl_missing and f"can't be used: {self.ccl_missing}"
        yield "ccl        " + (missing or self.ccl_note or "ready")
        yield "IPEX       " + (self.ipex or "not installed")
        if self.allocation:
            yield f"allocation {self.allocation.name}, {hosts_in_short(self.allocation.hosts)}"
        for i, (name, named) in enumerate(self.hostfiles.items()):
            yield f"{'' if i else 'hostfiles':10} {name}: {hosts_in_short(named)}"


def inspect(environ: Mapping[str, str]) -> Machine:
    """Collect the facts, which takes a few tenths of a second."""
    from cpulaunch.cli.backend import ensure_ccl
    from cpulaunch.config.config import Config
    from cpulaunch.discovery.host.installation import all_mpis
    from cpulaunch.discovery.host.this_host import facts_here

    notes: list[str] = []
    missing = ensure_ccl(Config(environ=environ), build=False, tell=notes.append)
    mpis: dict[str, Mpi] = {}
    for mpi in all_mpis("auto"):
        mpis.setdefault(mpi.flavour, mpi)
    return Machine(
        facts=facts_here(),
        mpis=tuple(mpis.values()),
        interfaces=tuple(_interfaces()),
        hostfiles=dict(_hostfiles()),
        allocation=_allocation(environ),
        ipex=_version(ENGINE_PACKAGES["ipex"]),
        ccl_missing=missing,
        ccl_note=" ".join(notes),
        submits=queues.load("slurm").available(),
    )


def _allocation(environ: Mapping[str, str]) -> Allocation | None:
    try:
        return allocation(environ, read_file)
    except CpulaunchError:
        return None  # `cpulaunch run` reports this error


def _interfaces() -> Iterator[tuple[str, str]]:
    try:
        found = interfaces_here()
    except OSError:
        return
    for interface in found:
        address = ip_address(interface.address)
        if address.version == 4 and not address.is_loopback:
            yield interface.name, interface.address


def _hostfiles() -> Iterator[tuple[str, tuple[Host, ...]]]:
    paths = [path for pattern in HOSTFILE_NAMES for path in sorted(Path().glob(pattern))]
    for path in paths[:MOST_HOSTFILES]:
        try:
            if path.is_file() and path.stat().st_size < 1_000_000:
                yield str(path), read_hostfile(path)
        except (CpulaunchError, OSError):
            continue


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def hosts_in_short(hosts: tuple[Host, ...]) -> str:
    """Return the number and the names of hosts, such as ``"4 hosts (node[1-4])"``."""
    return f"{counted(len(hosts), 'host')} ({fold_hosts(host.name for host in hosts)})"
