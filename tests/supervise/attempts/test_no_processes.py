"""If no more processes can be started, a job prints a line about it, and still reports failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.command import TIMEOUT, bounded, clean_environment
from support.jobs import box, outcome

ROOT = Path("/sys/fs/cgroup")
WHY = "can't be run: Resource temporarily unavailable (ulimit -u, or the control group, allows no more processes)"


class Group:
    """A control group that limits the number of processes and threads, even for root."""

    def __init__(self) -> None:
        parent = ROOT if (ROOT / "cgroup.controllers").exists() else ROOT / "pids"
        self.path = parent / f"cpulaunch-test-pids-{os.getpid()}"
        try:
            self.path.mkdir()
            (self.path / "pids.max").read_text()
        except OSError as error:
            with suppress(OSError):
                self.path.rmdir()
            pytest.skip(f"no control group that limits processes can be made here: {error}")

    def limit(self, processes: int | None = None) -> None:
        """Allow this number of processes, or no more than exist."""
        now = int((self.path / "pids.current").read_text())
        (self.path / "pids.max").write_text(str(now if processes is None else processes))

    def start(self, directory: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start ``cpulaunch run ARGUMENTS`` in the group."""
        return subprocess.Popen(
            [sys.executable, "-m", "cpulaunch", "run", "--oversubscribe", *arguments],
            cwd=directory, env=clean_environment(LC_ALL="C.UTF-8"), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: (self.path / "cgroup.procs").write_text(str(os.getpid())),
        )  # fmt: skip

    def is_left(self) -> bool:
        """Return whether a process stays in the group.  Killed processes need a moment to disappear."""
        deadline = time.monotonic() + 10
        while (left := (self.path / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(left)


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    for pid in (made.path / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    while (made.path / "cgroup.procs").read_text():
        time.sleep(0.01)
    made.path.rmdir()


@pytest.mark.parametrize("limit", [1, 20])
def test_a_job_that_cannot_be_started_prints_one_line(group: Group, tmp_path: Path, limit: int) -> None:
    group.limit(limit)
    with bounded(group.start(tmp_path, "-n", "40", "--no-python", "sleep", "300")) as launcher:
        out, err = launcher.communicate(timeout=TIMEOUT)
    assert (launcher.returncode, out) == (3, "")
    assert err.strip() == f"cpulaunch: error: {sys.executable} {WHY}"
    assert not group.is_left()


def test_an_agent_that_cannot_be_started_later_is_the_reported_failure(group: Group, tmp_path: Path) -> None:
    """The first agents already run.  Each of them is a process, and so is its program."""
    group.limit(150)
    with bounded(group.start(tmp_path, "-n", "120", "--no-python", "sleep", "300")) as launcher:
        _, err = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 3
    assert "was not started" in box(err)[0]
    assert "Resource temporarily unavailable" in err
    assert "Traceback" not in err
    assert outcome(tmp_path)["kind"] == "start_failed"
    assert not group.is_left()


def test_a_failure_is_reported_although_no_process_can_be_started(group: Group, tmp_path: Path) -> None:
    program = "touch up-$RANK; until test -e go; do read -t 0.01 <>/dev/zero; done; exit $((5 * RANK))"
    with bounded(group.start(tmp_path, "-n", "2", "--no-python", "bash", "-c", program)) as launcher:
        while len(list(tmp_path.glob("up-*"))) < 2:
            assert launcher.poll() is None
            time.sleep(0.01)
        group.limit()
        (tmp_path / "go").touch()
        _, err = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 5
    assert box(err)[0] == "rank 1 on localhost failed first"
    assert "Traceback" not in err
    assert not group.is_left()
