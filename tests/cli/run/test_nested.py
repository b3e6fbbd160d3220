"""`cpulaunch run` under another launcher is refused, because each of its processes would start a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run, clean_environment, mpi_options
from support.marks import repeat

from cpulaunch.cli.run.misuse import refuse_within_a_launcher
from cpulaunch.errors import UsageError

NESTED = """
import os, subprocess, sys
if os.environ["RANK"] == "0":
    command = [sys.executable, "-m", "cpulaunch", "run", *sys.argv[1:], "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    print(done.returncode, done.stdout + done.stderr)
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('trained')")
    return tmp_path


def test_a_run_within_a_rank_is_refused(cpulaunch: Run, train: Path) -> None:
    (train / "nested.py").write_text(NESTED)
    done = cpulaunch("run", "-n", "2", "nested.py", "-n", "1")
    error, hint = (line.removeprefix("[0] ") for line in done.stdout.splitlines()[:2])
    assert error.startswith("2 cpulaunch: error: this is a rank of the job ")
    assert error.endswith(", and each of its ranks would start another job")
    assert hint == "cpulaunch: hint: start cpulaunch outside the job"
    assert "trained" not in done.stdout


def test_a_dry_run_within_a_rank_is_allowed(cpulaunch: Run, train: Path) -> None:
    (train / "nested.py").write_text(NESTED)
    done = cpulaunch("run", "-n", "1", "nested.py", "-n", "1", "--dry-run")
    assert done.stdout.startswith("0 1 rank on "), done.stdout


@pytest.mark.parametrize(
    ("mpi", "size"),
    [("intel", "PMI_SIZE"), repeat("mpich", "PMI_SIZE"), ("openmpi", "OMPI_COMM_WORLD_SIZE")],
)
@pytest.mark.slow
def test_a_run_under_mpiexec_is_refused(train: Path, mpi: str, size: str) -> None:
    options = mpi_options(mpi)
    directory = Path(options[-1]) if "--mpi-path" in options else Path(sys.executable).parent
    as_root = ["--allow-run-as-root", "--oversubscribe"] if mpi == "openmpi" else []
    command = [
        directory / "mpiexec",
        *as_root,
        "-n",
        "2",
        sys.executable,
        "-m",
        "cpulaunch",
        "run",
        "train.py",
    ]
    done = subprocess.run(
        [str(word) for word in command], cwd=train, capture_output=True, text=True, timeout=TIMEOUT,
        env=clean_environment(), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"of 2 of mpiexec (${size}), and each process would start a job" in done.stderr
    assert (
        "cpulaunch: hint: leave out mpiexec: cpulaunch itself starts the ranks on all hosts (here -n 2)"
        in done.stderr
    )
    assert "trained" not in done.stdout


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
}


def test_a_run_in_a_slurm_step_of_several_tasks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"process 3 of 4 of srun \(\$SLURM_STEP_NUM_TASKS\)") as e:
        refuse_within_a_launcher(STEP)
    assert e.value.hint == "leave out srun: cpulaunch itself starts the ranks on all hosts (here -n 4)"


@pytest.mark.parametrize(
    "environ",
    [
        STEP | {"SLURM_PTY_PORT": "41234"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    ],
    ids=["srun --pty", "a step of one process", "sbatch"],
)
def test_a_run_is_allowed_if_slurm_started_a_single_process(environ: dict[str, str]) -> None:
    refuse_within_a_launcher(environ)
