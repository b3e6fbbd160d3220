"""Scripts that don't know cpulaunch, started by torchrun and by cpulaunch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.command import REPOSITORY, bounded, clean_environment, mpi_options, processes_with
from support.marks import repeat

HERE = Path(__file__).parent
LIMIT = 150.0  # seconds
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone")


@dataclass(frozen=True)
class Done:
    """The results of a job's ranks, by rank, its exit status, and its output."""

    results: list[Any]
    status: int
    output: str

    def ours(self) -> list[str]:
        """The lines that cpulaunch prints in ranks, without prefixes."""
        mark = "] cpulaunch: "
        return [line.partition(mark)[2] for line in self.output.splitlines() if mark in line]


Start = Callable[..., Done]

# Each library has tests whose ranks cpulaunch starts, and one whose ranks Intel MPI starts.
by_mpirun = pytest.mark.parametrize("start", ["mpirun", repeat("local")], indirect=True)


def run(
    directory: Path,
    command: tuple[str, ...],
    program: str | Path,
    arguments: tuple[object, ...],
    **environment: str,
) -> Done:
    (results := directory / "results").mkdir()
    beside = (str(REPOSITORY), str(HERE), environment.pop("PYTHONPATH", ""))
    env = clean_environment(
        TEST_RESULTS=str(results), HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore",
        PYTHONPATH=os.pathsep.join(filter(None, beside)), **environment,
    )  # fmt: skip
    words = [sys.executable, "-m", *command, HERE / program, *arguments]
    process = subprocess.Popen(
        [str(word) for word in words], cwd=directory, env=env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with bounded(process, LIMIT):
        output = process.communicate()[0]
    for left in processes_with(f"TEST_RESULTS={results}"):  # torchrun's ranks may still run when it has ended
        os.kill(left, signal.SIGKILL)
    reported = [json.loads(path.read_text()) for path in sorted(results.iterdir())]
    return Done(reported, process.returncode, output)


@pytest.fixture(scope="session")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """The results of a program under torchrun, computed once for all tests that compare with them.

    The exit status of torchrun means nothing: see `report`.
    """
    made: dict[tuple[object, ...], Done] = {}

    def start(program: str, *arguments: object, **environment: str) -> Done:
        key = (program, *arguments)
        if key not in made:
            directory = tmp_path_factory.mktemp("torchrun")
            made[key] = run(directory, TORCHRUN, program, arguments, OMP_NUM_THREADS="1", **environment)
            assert len(made[key].results) == 2, made[key].output
        return made[key]

    return start


@pytest.fixture(params=["local", repeat("mpirun")])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Run a program on two ranks, started by cpulaunch or by Intel MPI, to its successful end."""
    launcher = ("--launcher", "local") if request.param == "local" else tuple(mpi_options("intel"))

    def start(
        program: str | Path, *arguments: object, options: tuple[str, ...] = (), **environment: str
    ) -> Done:
        command = ("cpulaunch", "run", "-n", "2", "--oversubscribe", "--tee", "all", *launcher, *options)
        (directory := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        done = run(directory, command, program, arguments, **environment)
        assert done.status == 0, done.output
        return done

    return start


def assert_alike(ours: Any, theirs: Any) -> None:
    """Assert that results are equal except for rounding, as fused steps and cpulaunch's sums round
    differently."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_alike(ours[key], value)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_alike(one, other)
    else:
        assert ours == (pytest.approx(theirs, rel=1e-3, abs=1e-3) if isinstance(theirs, float) else theirs)
