"""A process in a real control group sees its cpuset and quota.  Skipped if no control group can be made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.discovery.host.cgroup import cgroup_limits
from cpulaunch.discovery.host.files import read_file
from cpulaunch.discovery.host.this_host import topology_of_process
from cpulaunch.model.cores import CoreSet

ROOT = Path("/sys/fs/cgroup")
UNIFIED = (ROOT / "cgroup.controllers").exists()


def report(groups: list[str]) -> None:
    """Enter the groups, and print the available CPUs and the quota.  This runs in a child process."""
    for group in groups:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    cpuset, quota = cgroup_limits(read_file)
    topology = topology_of_process(read_file, CoreSet(os.sched_getaffinity(0)))
    print(json.dumps({"cpuset": str(cpuset), "quota": quota, "topology": topology.to_json()}))


@pytest.fixture
def groups() -> Iterator[Any]:
    """A function that makes a control group and writes its files.  All are removed after the test."""
    with ExitStack() as made:

        def make(controller: str, files: Mapping[str, str]) -> str:
            parent = ROOT if UNIFIED else ROOT / controller
            group = parent / f"cpulaunch-test-{controller}-{os.getpid()}"
            try:
                if UNIFIED and controller not in (ROOT / "cgroup.subtree_control").read_text().split():
                    pytest.skip(f"no {controller} controller for groups here")
                group.mkdir()
                made.callback(group.rmdir)
                for name, text in files.items():
                    (group / name).write_text(text)
            except OSError as error:
                pytest.skip(f"no control group can be made here: {error}")
            return str(group)

        yield make


def seen_in(*groups: str) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, __file__, *groups], capture_output=True, text=True, check=True, timeout=60
    )
    seen: dict[str, Any] = json.loads(child.stdout)
    return seen


def test_a_process_in_a_cpuset_sees_its_cpus(groups: Any) -> None:
    last = max(os.sched_getaffinity(0))
    files = {"cpuset.cpus": str(last)} if UNIFIED else {"cpuset.mems": "0", "cpuset.cpus": str(last)}
    seen = seen_in(groups("cpuset", files))
    assert seen["cpuset"] == str(last)
    assert [row[0] for row in seen["topology"]["cpus"]] == [last]


def test_a_process_with_a_quota_sees_its_cpu_time(groups: Any) -> None:
    v1 = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    seen = seen_in(groups("cpu", {"cpu.max": "150000 100000"} if UNIFIED else v1))
    assert seen["quota"] == 1.5
    assert seen["topology"]["quota"] == 1.5


def test_a_plan_in_a_group_with_a_quota_has_no_more_threads_than_the_quota(
    groups: Any, tmp_path: Path
) -> None:
    """The machine must have more CPUs than the quota."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has only one core")
    v1 = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    group = groups("cpu", {"cpu.max": "150000 100000"} if UNIFIED else v1)
    (tmp_path / "train.py").write_text("")
    command = ["run", "-n", "1", "--backend", "gloo", "--dry-run", "--format", "json", "train.py"]
    child = subprocess.run(
        [sys.executable, __file__, group, "--", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    plan = json.loads(child.stdout)
    assert plan["hosts"][0]["ranks"][0]["threads"] == 1
    assert "localhost: a CPU quota of 1.5 CPUs for 1 rank: 1 thread each" in plan["notes"]


if __name__ == "__main__":
    groups_to_enter, _, command_there = " ".join(sys.argv[1:]).partition(" -- ")
    if command_there:
        for each in groups_to_enter.split():
            Path(each, "cgroup.procs").write_text(str(os.getpid()))
        os.execv(sys.executable, [sys.executable, "-m", "cpulaunch", *command_there.split()])
    report(sys.argv[1:])
