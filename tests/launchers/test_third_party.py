"""Launchers of other packages, found by their entry points."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.command import Run
from support.jobs import box, outcome, outputs
from support.packages import install

SHELL_LAUNCHER = '''
"""One shell starts all ranks, and sets the variables of each."""

from cpulaunch.launchers.agent_command import agent_argv, placement_variables
from cpulaunch.launchers.base import Launcher
from cpulaunch.launchers.command import Command
from cpulaunch.plan.placement import IdentityVariables

LOOP = """
size=$1; shift
for rank in $(seq 0 $((size - 1))); do SHELL_RANK=$rank SHELL_LOCAL_RANK=$rank SHELL_SIZE=$size "$@" & done
wait
"""


class Shell(Launcher):
    name = "shell"
    title = "a shell"
    identity = IdentityVariables("SHELL_RANK", "SHELL_SIZE", "SHELL_LOCAL_RANK")
    this_host_only = True

    def commands(self, plan, installation):
        argv = ("sh", "-c", LOOP, "sh", str(plan.world_size), *agent_argv(plan, installation))
        shared = {name: value for name, value in plan.env.items() if name not in plan.private}
        return (Command(argv, {**shared, **placement_variables(plan, self)}),)


SHELL = Shell()
'''


VENDORS_MPI = """
from dataclasses import replace
from cpulaunch.launchers.hydra import INTEL

VENDOR = replace(INTEL, name="vendor", title="a vendor's MPI")
"""


@pytest.fixture
def package(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site").mkdir()
    return install(
        tmp_path / "site",
        "shell_launcher",
        SHELL_LAUNCHER,
        {"cpulaunch.launchers": "shell = shell_launcher:SHELL"},
    )


def test_a_third_party_launcher_starts_the_planned_ranks(cpulaunch: Run, package, marked, show: Path) -> None:
    done = cpulaunch("run", "--launcher", "shell", "-n", "2", "show.py", env={**package, **marked})
    ranks = outputs(done)
    assert [rank["env"]["RANK"] for rank in ranks] == ["0", "1"]
    assert not set(ranks[0]["cpus"]) & set(ranks[1]["cpus"])
    assert "started by a shell" in done.stderr
    (plan,) = show.parent.glob("runs/*/plan.json")
    assert json.loads(plan.read_text())["starter"] == "shell"


def test_a_failing_rank_is_named_and_nothing_is_left(cpulaunch: Run, package, marked, fail: Path) -> None:
    done = cpulaunch("run", "--launcher", "shell", "-n", "2", "fail.py", "exit", env={**package, **marked})
    assert done.returncode == 3
    assert box(done.stderr)[0] == "rank 1 on localhost failed first"
    assert outcome(fail.parent)["kind"] == "exit"


def test_an_unknown_name_is_an_error_that_lists_valid_names(cpulaunch: Run, package, show: Path) -> None:
    done = cpulaunch("run", "--launcher", "shel", "-n", "2", "show.py", env=package)
    assert done.returncode == 2
    for word in ("--launcher", "'shel'", "local", "mpirun", "shell"):
        assert word in done.stderr


def test_an_mpi_of_another_package_is_found_on_the_path(cpulaunch: Run, marked, show: Path) -> None:
    (show.parent / "site").mkdir()
    package = install(
        show.parent / "site",
        "vendors_mpi",
        VENDORS_MPI,
        {"cpulaunch.launchers": "vendor = vendors_mpi:VENDOR"},
    )
    env = {**package, **marked, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = cpulaunch("run", "--launcher", "vendor", "-n", "2", "show.py", env=env)
    assert [rank["env"]["RANK"] for rank in outputs(done)] == ["0", "1"]
    assert "started by a vendor's MPI" in done.stderr


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("7", "'shell' of cpulaunch.launchers is not a Launcher, but of type int"),
        ("type('Bare', (Shell,), {'title': property()})()", "it lacks title"),
    ],
)
def test_an_entry_point_that_names_no_launcher_is_an_error(
    cpulaunch: Run, show: Path, value: str, said: str
) -> None:
    (show.parent / "site").mkdir()
    package = install(
        show.parent / "site", "no_launcher", f"{SHELL_LAUNCHER}\nVALUE = {value}\n",
        {"cpulaunch.launchers": "shell = no_launcher:VALUE"},
    )  # fmt: skip
    done = cpulaunch("run", "--launcher", "shell", "-n", "2", "show.py", env=package)
    assert done.returncode == 2
    assert said in done.stderr
