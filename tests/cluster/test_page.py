"""The commands in docs/clusters.md, except installations of packages, and a dry run that other tests run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY, clean_environment, needs_two_cores
from support.faults import Cluster

pytestmark = [pytest.mark.slow, needs_two_cores]

SHORT = "--epochs 1"
"""An option that shortens the training by the page's script."""

LONGEST = 180.0

PAGE = (REPOSITORY / "docs" / "clusters.md").read_text()
LINES = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


def commands(beginning: str) -> list[str]:
    """The commands on the page that start with ``beginning``, without comments and prompts."""
    found = [line.removeprefix("$ ").partition("  #")[0].strip() for line in LINES]
    return [line for line in found if line.startswith(beginning)]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory like a checkout, with cpulaunch as a program."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "bin").mkdir()
    (program := tmp_path / "bin" / "cpulaunch").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m cpulaunch "$@"\n'
    )
    program.chmod(0o755)
    return tmp_path


def environment(here: Path) -> dict[str, str]:
    clean = clean_environment(LC_ALL="C.UTF-8")
    return clean | {"PATH": f"{here / 'bin'}:{clean['PATH']}"}


def test_the_first_commands_on_the_page_run_a_job(cluster: Cluster, here: Path) -> None:
    """This runs the page's first commands after the installation."""
    first, *_ = re.findall(r"```\n(.*?)```", PAGE, re.S)
    typed = [line.partition("  #")[0].strip() for line in first[first.index("printf ") :].splitlines()]
    assert len(typed) == 3
    script = "\n".join([*typed[:2], f"{typed[2]} {SHORT}"])
    done = cluster.run("login", ["sh", "-ec", script], directory=here, env=environment(here), timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("✓  node") == 4
    assert "test accuracy" in done.stdout


def test_the_commands_that_check_and_record_hosts_work(cluster: Cluster, here: Path) -> None:
    cluster.hostfile(here / "four-nodes", ("node0", "node1", "node2", "node3"))
    (check,) = (each for each in commands("cpulaunch hosts check") if each.endswith("train.py"))
    done = cluster.run(
        "login",
        ["sh", "-c", check.replace("check", "check --facts-out hosts.json")],
        directory=here,
        env=environment(here),
    )
    assert done.returncode == 0, done.stderr
    (planned,) = re.findall(r"`(cpulaunch run --facts [^`]*)`", PAGE)
    done = subprocess.run(
        shlex.split(planned), cwd=here, env=environment(here), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "hosts" in done.stdout


@pytest.mark.repeats
def test_the_commands_for_a_local_test_cluster_work(here: Path) -> None:
    check, run, _ = commands("cluster ")
    argv = [str(REPOSITORY / "scripts" / "play_cluster.sh"), "sh", "-ec", f"{check}\n{run} {SHORT}"]
    env = {**environment(here), "PYTHON": sys.executable}
    done = subprocess.run(
        argv,
        cwd=here,
        env=env,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("✓  node") == 4
    assert "test accuracy" in done.stdout
