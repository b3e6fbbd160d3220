"""Find cpulaunch's own scripts and the MPIs on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cpulaunch
from cpulaunch import launchers
from cpulaunch.launchers.command import Installation
from cpulaunch.launchers.mpi import Mpiexec
from cpulaunch.launchers.reach import SSH
from cpulaunch.model.facts import Mpi


def installation_here() -> Installation:
    """The paths of the running cpulaunch."""
    agent = Path(cpulaunch.__file__).parent / "agent"
    return Installation(str(agent / "run_agent.py"), SSH, str(agent / "run_spawner.py"))


_VERSION_TIMEOUT = 10.0  # seconds


def find_mpis(flavour: str, where: str) -> tuple[Mpi, ...]:
    """Find the first MPI of ``flavour``; ``auto`` means any.  If there is none, return all other MPIs.

    ``where`` is a directory or an mpiexec; ``auto`` means this Python's environment, then ``$I_MPI_ROOT``,
    then PATH.
    """
    found = []
    for mpi in all_mpis(where):
        if flavour in ("auto", mpi.flavour):
            return (mpi,)
        found.append(mpi)
    return tuple(found)


def all_mpis(where: str) -> Iterator[Mpi]:
    """Yield all MPIs in ``where`` (see `find_mpis`)."""
    found = set()
    for path in _candidates(where):
        if (mpi := _identify(path)) and mpi not in found:
            found.add(mpi)
            yield mpi


def _known() -> list[Mpiexec]:
    return [launchers.load_mpi(flavour) for flavour in launchers.MPIS]


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
    names = dict.fromkeys(name for mpi in _known() for name in mpi.executables)
    for directory in dict.fromkeys(directories):
        yield from (directory / name for name in names)


def _identify(path: Path) -> Mpi | None:
    if not path.is_file() or not os.access(path, os.X_OK):
        return None
    for mpi in _known():
        if path == Path(sys.prefix, "bin", mpi.executables[0]) and (version := _pip_version(mpi.wheel)):
            return Mpi(mpi.name, str(path), version)
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
    printed = done.stdout + done.stderr
    found = next((mpi for mpi in _known() if any(words in printed for words in mpi.version_words)), None)
    if found is None:
        return None
    called = path.with_name(found.called_by_script or path.name)
    return Mpi(found.name, str((called if called.is_file() else path).absolute()), _version(done.stdout))


def _pip_version(package: str) -> str | None:
    """The version of a package in this environment, or None.

    The name of the package's directory contains it.  To call the program would take 20 ms.
    """
    if not package:
        return None
    packages = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    here = next(packages.glob(f"{package}-*.dist-info"), None)
    return here.name.removesuffix(".dist-info").partition("-")[2] if here else None


def _version(text: str) -> str:
    words = text.replace(",", " ").split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")
