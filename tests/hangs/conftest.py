"""Running a program that hangs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.command import Run
from support.hangs import PROGRAM, Hang


@pytest.fixture
def hang(cpulaunch: Run, built, marked, tmp_path: Path) -> Hang:
    """Run a program with the named kind of hang until it is reported and ended."""
    (tmp_path / "train.py").write_text(PROGRAM)

    def run(
        case: str, *options: str, backend: str = "ccl", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        settings = ("--stall-timeout", "3", "--stall-action", "abort", "--grace-period", "1")
        wanted = ("-n", "2", "--backend", backend, *settings, *options)
        return cpulaunch("run", *wanted, "train.py", backend, case, env={**marked, **environment})

    return run
