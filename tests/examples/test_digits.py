"""The example with real data is equally accurate with every launcher and backend, and under torchrun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY, Run, clean_environment, mpi_options
from support.marks import repeat

pytestmark = pytest.mark.slow

DIGITS = REPOSITORY / "examples" / "digits.py"
TIMEOUT = 180.0


def accuracy(output: str) -> float:
    """Return the accuracy in per cent."""
    (found,) = re.findall(r"test accuracy ([0-9.]+)%", output)
    return float(found)


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        repeat("local", "gloo"),
        ("intel", "ccl"),
        repeat("mpich", "gloo"),
        repeat("openmpi", "ccl"),
    ],
)
def test_digits_are_learnt(cpulaunch: Run, tmp_path: Path, launcher: str, backend: str) -> None:
    options = ("--launcher", "local") if launcher == "local" else mpi_options(launcher)
    done = cpulaunch("run", "-n", "2", *options, "--backend", backend, DIGITS, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) >= 97
    lines = sorted(line for line in done.stdout.splitlines() if "backend" in line)
    assert [f"[{r}] rank {r} of 2: backend {backend}, " in line for r, line in enumerate(lines)] == [
        True,
        True,
    ]
    (plan,) = tmp_path.glob("runs/*/plan.json")
    planned = json.loads(plan.read_text())["hosts"][0]["ranks"]
    for rank, line in zip(planned, lines, strict=True):
        threads, cores = rank["threads"], rank["cores"].replace(",", ", ")
        assert line.endswith(f", {threads} thread{'s' * (threads > 1)}, CPUs [{cores}]")


def test_the_same_script_runs_under_torchrun(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run([torchrun, "--nproc-per-node", "2", DIGITS, "--epochs", "2"],
                          env=clean_environment(TMPDIR=str(tmp_path)), text=True,
                          capture_output=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)  # fmt: skip
    assert accuracy(done.stdout) > 85
    assert "backend gloo, fp32" in done.stdout
