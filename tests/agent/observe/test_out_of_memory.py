"""Whether a program was killed because memory ran out, or by another process."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Run
from support.jobs import box


@pytest.mark.slow
def test_an_out_of_memory_kill_differs_from_another_kill(cpulaunch: Run, tmp_path: Path) -> None:
    """The test needs a memory cgroup, version 1 or 2."""
    with memory_cgroup(64 << 20) as procs:
        greedy = "x = [bytearray(1 << 20) for _ in range(1000)]"
        command = f"echo $$ > {procs} && exec {sys.executable} -c '{greedy}'"
        done = cpulaunch("run", "-n", "1", "--no-python", "sh", "-c", command)
    assert done.returncode == 137, done.stderr
    title, lines = box(done.stderr)
    assert title == "rank 0 on localhost failed first"
    assert lines[0] == "SIGKILL (killed)"
    assert re.search(
        "because memory ran out: .*Killed process|killed a process because memory ran out", lines[1]
    )


def test_a_kill_from_outside_is_not_reported_as_out_of_memory(cpulaunch: Run, tmp_path: Path) -> None:
    done = cpulaunch("run", "-n", "1", "--no-python", "sh", "-c", "kill -9 $$")
    assert done.returncode == 137
    assert re.match(r"not out of memory \(peak 0\.\d\d GiB\)", box(done.stderr)[1][1])


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """The file cgroup.procs of a new control group that is limited to ``limit`` bytes of memory."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, name = (one, "memory.limit_in_bytes") if one.is_dir() else (two, "memory.max")
    group = parent / f"cpulaunch-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no cgroup can be made in {parent}: {e}")
    try:
        if not (group / name).exists():
            pytest.skip(f"{parent} doesn't limit memory")
        (group / name).write_text(str(limit))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()
