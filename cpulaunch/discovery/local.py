"""Find out: this host's facts, and the MPIs that are installed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cpulaunch.discovery.libraries import find_libraries, import_directories, library_directories
from cpulaunch.discovery.this_host import read_file, topology_here
from cpulaunch.model.facts import BF16_FLAGS, HostFacts, Mpi

_NAMES = ("mpiexec.hydra", "mpiexec", "mpirun")
_VERSION_TIMEOUT = 10.0  # seconds


def facts_here(libraries: Sequence[str] | None = None, packages: Sequence[str] | None = None) -> HostFacts:
    """The facts of this host; libraries are looked for in these directories, else in our environment's."""
    return HostFacts(
        topology=topology_here(),
        names=frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname()}),
        cpu_flags=_cpu_flags(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        libraries=find_libraries(
            library_directories() if libraries is None else libraries,
            import_directories() if packages is None else packages,
        ),
    )


def names_here() -> frozenset[str]:
    """All names and addresses by which a hostfile may call this host.  Asks no name server."""
    from cpulaunch.discovery.interfaces import interfaces_here

    names = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().partition(".")[0]}
    names |= {interface.address for interface in interfaces_here()}
    for line in (read_file("/etc/hosts") or "").splitlines():
        address, *others = line.partition("#")[0].split() or [""]
        if address in names or address.startswith("127."):  # Debian gives the host 127.0.1.1
            names.update(others)
    return frozenset(names)


def find_mpis(flavour: str, where: str) -> tuple[Mpi, ...]:
    """The MPI of ``flavour`` (or the first, for ``auto``); where there is none, all that were found.

    ``where`` is a directory or file to look at, or ``auto``: this Python's own environment, then
    ``$I_MPI_ROOT``, then PATH.
    """
    found = []
    for path in _candidates(where):
        if (mpi := _identify(path)) and mpi not in found:
            if flavour in ("auto", mpi.flavour):
                return (mpi,)
            found.append(mpi)
    return tuple(found)


def flavour_of(version_text: str) -> str | None:
    """Which MPI says this of itself, asked for ``--version``."""
    if "Open MPI" in version_text or "OpenRTE" in version_text:
        return "openmpi"
    if "Intel(R) MPI" in version_text:
        return "intel"
    return "mpich" if "HYDRA" in version_text else None


def _candidates(where: str) -> Iterator[Path]:
    if where == "auto":
        directories = [Path(sys.prefix, "bin")]
        if root := os.environ.get("I_MPI_ROOT"):
            directories.append(Path(root, "bin"))
        directories += [Path(entry) for entry in os.environ.get("PATH", "").split(":") if entry]
    elif Path(where).is_dir():
        directories = [Path(where), Path(where, "bin")]
    else:
        directories = []
        yield Path(where)
    for directory in dict.fromkeys(directories):
        yield from (directory / name for name in _NAMES)


def _identify(path: Path) -> Mpi | None:
    if not path.is_file() or not os.access(path, os.X_OK):
        return None
    if path == Path(sys.prefix, "bin", "mpiexec.hydra") and (version := _pip_version("impi_rt")):
        return Mpi("intel", str(path), version)
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_VERSION_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    flavour = flavour_of(done.stdout + done.stderr)
    if flavour is None:
        return None
    # Killing Intel's mpirun, a shell script, leaves the whole job behind: take what it calls.
    hydra = path.with_name("mpiexec.hydra")
    if flavour == "intel" and hydra.is_file():
        path = hydra
    return Mpi(flavour, str(path.absolute()), _version(done.stdout))


def _pip_version(package: str) -> str | None:
    """The version of a package in this environment, as its directory's name has it: 0.1 ms, where
    asking the program takes 20."""
    packages = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    here = next(packages.glob(f"{package}-*.dist-info"), None)
    return here.name.removesuffix(".dist-info").partition("-")[2] if here else None


def _version(text: str) -> str:
    words = text.replace(",", " ").split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def _cpu_flags() -> tuple[str, ...] | None:
    """Those of BF16_FLAGS that the first CPU has; None where /proc/cpuinfo doesn't say."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
            flags = next(line for line in f if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return None
    words = set(flags.split())
    # Arm's name for the same ability.
    return tuple(flag for flag in BF16_FLAGS if flag in words) or (("bf16",) if "bf16" in words else ())
