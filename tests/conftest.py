"""What the tests share: running the real command line, and the MPIs at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

REPOSITORY = Path(__file__).parent.parent
TIMEOUT = 60.0
"""Seconds after which a command counts as hung."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out of scripts/test.sh --fast")


def clean_environment(**further: str) -> dict[str, str]:
    """Our environment without settings of cpulaunch or its field."""
    names = ("CPULAUNCH_", "OMP_", "KMP_", "CCL_", "FI_", "I_MPI_", "MASTER_", "SLURM_", "PBS_", "XDG_CONFIG")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(names)}, **further}


@pytest.fixture
def cpulaunch(tmp_path: Path) -> Run:
    """Run ``cpulaunch ARGS`` in an empty directory, to its end."""

    def run(
        *arguments: object,
        env: dict[str, str] | None = None,
        cwd: Path = tmp_path,
        timeout: float = TIMEOUT,
        text: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cpulaunch", *map(str, arguments)],
            cwd=cwd,
            timeout=timeout,
            text=text,
            env=clean_environment(**(env or {})),
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )

    return run


def mpi_options(flavour: str) -> list[str]:
    """Options that choose an MPI: Intel's is in the venv; scripts/test.sh says where the others are."""
    if flavour == "intel":
        return ["--mpi", "intel"]
    directory = os.environ.get(f"CPULAUNCH_TEST_{flavour.upper()}")
    if not directory:
        pytest.skip(f"CPULAUNCH_TEST_{flavour.upper()} is not set: scripts/test.sh sets it")
    return ["--mpi", flavour, "--mpi-path", directory]


@pytest.fixture(
    params=[
        "local",
        pytest.param("intel", marks=pytest.mark.slow),
        pytest.param("mpich", marks=pytest.mark.slow),
        pytest.param("openmpi", marks=pytest.mark.slow),
    ]
)
def starter(request: pytest.FixtureRequest) -> list[str]:
    """The options for each starter in turn."""
    return ["--launcher", "local"] if request.param == "local" else mpi_options(request.param)


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


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment to run a job in; the test fails if a process with it is left at its end."""
    mark = {"TEST_MARK": str(tmp_path)}
    yield mark
    left = processes_with(f"TEST_MARK={tmp_path}")
    for pid in left:
        os.kill(pid, 9)
    assert not left, f"processes left behind: {left}"
