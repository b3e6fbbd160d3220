"""Run `programs` under `cpulaunch run`, with the current torch and with Intel's stack."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.command import clean_environment, intel_python

from cpulaunch.runtime.change.engines import ipex

PROGRAMS = Path(__file__).with_name("programs.py")
LIMIT = 120.0  # seconds


@dataclass(frozen=True)
class Job:
    """The results of a job's ranks, in the order of ranks, and its stderr."""

    results: list[Any]
    stderr: str

    def ours(self) -> list[str]:
        """The lines that cpulaunch prints in ranks, without prefixes."""
        ranks = len(self.results)
        mark = "] cpulaunch: " if ranks > 1 else "cpulaunch: "
        return [line.partition(mark)[2] for line in self.stderr.splitlines() if mark in line]


Start = Callable[..., Job]


def _start(python: Path, directory: Path) -> Start:
    def start(ranks: int, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> Job:
        command = [python, "-m", "cpulaunch", "run", "-n", ranks, "--oversubscribe", "--tee", "all",
                   *options, PROGRAMS]  # fmt: skip
        done = subprocess.run(
            [*map(str, command), *arguments], cwd=directory, env=clean_environment(HF_HUB_OFFLINE="1", **environment),
            capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = {}
        for line in done.stdout.splitlines():
            # A single rank has no prefix.
            if returned := re.fullmatch(r"(?:\[(\d+)\] )?RESULT (\{.*\})", line):
                found[int(returned[1] or 0)] = json.loads(returned[2])
        assert sorted(found) == list(range(ranks)), done.stdout
        return Job([found[rank] for rank in sorted(found)], done.stderr)

    return start


@pytest.fixture
def job(tmp_path: Path) -> Start:
    """Run a function of `programs` on N ranks."""
    return _start(Path(sys.executable), tmp_path)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function's result on one rank in fp32, computed once for all tests that compare with it."""

    @functools.cache
    def start(*arguments: str) -> Any:
        one_rank = _start(Path(sys.executable), tmp_path_factory.mktemp("alone"))
        return one_rank(1, *arguments, options=("--precision", "fp32")).results[0]

    return start


@pytest.fixture
def fitting_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that IPEX can be imported beside the installed transformers."""
    monkeypatch.setattr(ipex, "_unfit_transformers", lambda version: None)


@pytest.fixture
def intel_job(tmp_path: Path) -> Start:
    """Run a function of `programs` on N ranks with torch 2.8 and IPEX 2.8."""
    return _start(intel_python(), tmp_path)
