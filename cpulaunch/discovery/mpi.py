"""The MPIs that are installed on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cpulaunch import launchers
from cpulaunch.model.facts import Mpi

_NAMES = ("mpiexec.hydra", "mpiexec", "mpirun")
_VERSION_TIMEOUT = 10.0  # seconds


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
    for flavour in launchers.MPIS:
        if any(words in version_text for words in launchers.load_mpi(flavour).version_words):
            return flavour
    return None


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
