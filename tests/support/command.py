"""Run the real command line in a clean environment, with the available MPIs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpulaunch.discovery.host.this_host import cpu_flags

Run = Callable[..., "subprocess.CompletedProcess[str]"]

REPOSITORY = Path(__file__).parent.parent.parent
TIMEOUT = 60.0
"""Seconds after which a command counts as hung."""

HAS_BF16 = cpu_flags() != ()
"""Whether this CPU has, or may have, instructions for bf16.  Otherwise, fp32 is the default here, and IPEX
has no bf16."""

needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason="needs a CPU with instructions for bf16")
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


def clean_environment(**further: str) -> dict[str, str]:
    """Return this environment without cpulaunch's settings and without variables that count as settings."""
    names = ("CPULAUNCH_", "OMP_", "KMP_", "CCL_", "FI_", "I_MPI_", "MASTER_", "SLURM_", "PBS_", "XDG_CONFIG")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(names)}, **further}


def mpi_options(flavour: str) -> list[str]:
    """Options that choose an MPI.

    Intel's is in the venv, and scripts/test.sh sets the paths of the others.
    """
    if flavour == "intel":
        return ["--mpi", "intel"]
    directory = os.environ.get(f"CPULAUNCH_TEST_{flavour.upper()}")
    if not directory:
        pytest.skip(f"CPULAUNCH_TEST_{flavour.upper()} is not set: scripts/test.sh sets it")
    return ["--mpi", flavour, "--mpi-path", directory]


def launcher_options(name: str) -> list[str]:
    """Options that choose the launcher for several hosts: an MPI, or ssh."""
    return ["--launcher", "ssh"] if name == "ssh" else mpi_options(name)


def mpiexec_after(directory: Path, command: str, flavour: str = "intel") -> list[str]:
    """Options for a script in place of mpiexec; it runs ``command`` followed by the real mpiexec."""
    path = directory / "mpiexec"
    if flavour == "intel":
        real = Path(sys.prefix, "bin", "mpiexec.hydra")
    else:
        real = Path(mpi_options(flavour)[-1], "mpiexec")
    path.write_text(f'#!/bin/sh\ncase $1 in --version) exec {real} --version;; esac\n{command} {real} "$@"\n')
    path.chmod(0o755)
    return ["--mpi", flavour, "--mpi-path", str(path)]


def intel_python() -> Path:
    """The Python of an environment with torch 2.8 and IPEX 2.8.  scripts/test.sh sets its path."""
    directory = os.environ.get("CPULAUNCH_TEST_INTEL")
    if not directory:
        pytest.skip("CPULAUNCH_TEST_INTEL is not set: scripts/test.sh sets it")
    return Path(directory, "python")


@contextlib.contextmanager
def bounded(process: subprocess.Popen[str], limit: float = TIMEOUT) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed after ``limit`` seconds, so waiting for its output is bounded.

    At the end of the block, it has ended, and its pipes are closed.
    """
    timer = threading.Timer(limit, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.wait(TIMEOUT)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()


def processes_with(variable: str) -> list[int]:
    """The pids of all processes whose environment holds ``variable`` (NAME=VALUE)."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            pass
    return found
