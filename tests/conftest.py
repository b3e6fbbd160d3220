"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support import programs
from support.command import TIMEOUT, Run, clean_environment, mpi_options, processes_with
from support.namespaces import until

from cpulaunch.ccl import installed
from cpulaunch.launchers import MPIS

# A busy machine must not fail a test.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out of scripts/test.sh --fast")
    config.addinivalue_line("markers", "repeats: like another test; only scripts/test.sh --all runs it")
    # A shell makes processes that it starts with & ignore Ctrl-C, and the tests' processes would inherit
    # that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def list_of_jobs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the jobs of tests out of the user's own list."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


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


@pytest.fixture(params=["local", *(pytest.param(mpi, marks=pytest.mark.slow) for mpi in MPIS)])
def launcher_options(request: pytest.FixtureRequest) -> list[str]:
    """Run the test with each launcher; return the launcher's options."""
    return ["--launcher", "local"] if request.param == "local" else mpi_options(request.param)


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment for a job.  The test fails if a process with this environment is left at its end."""
    mark = {"TEST_MARK": str(tmp_path)}
    yield mark
    left = processes_with(f"TEST_MARK={tmp_path}")
    for pid in left:
        os.kill(pid, 9)
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="session")
def built() -> installed.Built:
    """Return the compiled process group for this torch."""
    there = installed.state()
    if there.torch is None:
        pytest.skip("torch is not installed")
    if there.built is None:
        pytest.fail(f"{there.problem}: run `cpulaunch ccl build` first")
    return there.built


@pytest.fixture
def show(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text(programs.SHOW)
    return path


@pytest.fixture
def fail(tmp_path: Path) -> Path:
    path = tmp_path / "fail.py"
    path.write_text(programs.FAIL)
    return path


@pytest.fixture
def cpu_group() -> Iterator[Path]:
    """A control group that may use a twentieth of a CPU."""
    root = Path("/sys/fs/cgroup")
    unified = (root / "cgroup.controllers").exists()
    group = (root if unified else root / "cpu") / f"cpulaunch-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no control group can be made here: {e}")
    try:
        if unified:
            (group / "cpu.max").write_text("5000 100000")
        else:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("5000")
        yield group
    except OSError as e:
        pytest.skip(f"no quota can be set here: {e}")
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()
