"""One Slurm for all tests of this folder, on its own hosts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.command import clean_environment
from support.namespaces import until
from support.slurm import Queue, why_not

HOSTS = ("node0", "node1", "node2", "node3")

GONE_WITHIN = 10.0
"""Seconds within which processes that a test has ended must be gone."""

CPULAUNCH = (sys.executable, "-m", "cpulaunch")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def the_queue() -> Iterator[Queue]:
    if problem := why_not():
        # If Slurm is required, as in scripts/test.sh, tests must not be skipped.
        (pytest.fail if os.environ.get("CPULAUNCH_TEST_CLUSTER") else pytest.skip)(f"no Slurm: {problem}")
    with Queue(("login", *HOSTS)) as queue:
        yield queue


@pytest.fixture
def queue(the_queue: Queue) -> Iterator[Queue]:
    """A host called login and four nodes of Slurm.  A test must leave no process and no job on them."""
    yield the_queue

    def left() -> list[str]:
        return the_queue.processes() + the_queue.jobs()

    with contextlib.suppress(TimeoutError):
        until(lambda: not left(), "all processes to end", limit=GONE_WITHIN)
    assert not left(), f"left behind: {left()}"


@pytest.fixture
def salloc(queue: Queue, tmp_path: Path) -> Run:
    """Run ``cpulaunch ARGS``, or another ``program``, in an allocation with the options ``given``, on the host ``login``."""

    def run(
        given: str,
        *arguments: object,
        program: Sequence[str] = CPULAUNCH,
        timeout: float = 60.0,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        inside = ["env", *(f"{name}={value}" for name, value in env.items())]
        argv = ["salloc", "--quiet", *given.split(), *inside, *program, *map(str, arguments)]
        environ = clean_environment(LC_ALL="C.UTF-8", **queue.environment)
        return queue.run("login", argv, timeout=timeout, directory=tmp_path, env=environ)

    return run
