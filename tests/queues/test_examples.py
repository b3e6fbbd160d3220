"""The queues of examples/queues, installed like a package, and their golden scripts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY, TIMEOUT, clean_environment
from support.packages import install

from cpulaunch.plugins import QUEUES

HERE = REPOSITORY / "examples" / "queues"
GOLDEN = Path(__file__).parent / "golden"

JOBS = {
    "pbs": "-l select=4:ncpus=28:mpiprocs=2 -l walltime=2:00:00 -q batch",
    "pbs-whole-nodes": "--nnodes 4 -N bert",
    "lsf": "-n 7 -R span[ptile=2] -W 2:00",
    "lsf-whole-nodes": "--nnodes 4 -J bert",
    "flux": "--nodes 4 --time-limit 2h --setattr=system.x=1 -ppn 2",
    "flux-whole-nodes": "--nnodes 4",
}

# Scripts in place of the queues' programs, which report an accepted job, and its end.
PROGRAMS = {
    "qsub": "cat >/dev/null; echo 7.server",
    "qstat": "echo ' job_state = F'; echo ' Exit_status = 5'",
    "bsub": "cat >/dev/null; echo 'Job <7> is submitted to default queue <normal>.'",
    "bjobs": "echo 'EXIT 5'",
    "flux": "case $1 in batch) cat >/dev/null; echo f7;; *) exit 5;; esac",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (site := tmp_path / "site").mkdir()
    found: dict[str, str] = {}
    for name in ("pbs", "lsf", "flux"):
        module = f"cpulaunch_queue_{name}"
        code = (HERE / f"{module}.py").read_text()
        found = install(site, module, code, {QUEUES: f"{name} = {module}:QUEUE"})
    (programs := tmp_path / "bin").mkdir()
    for name, script in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "train.py").write_text("")
    cpus = "".join(f"{number},{number},0,0\n" for number in range(8))
    (tmp_path / "lscpu").write_text(f"# CPU,CORE,SOCKET,NODE\n{cpus}")
    return clean_environment(PATH=f"{programs}:{os.environ['PATH']}", **found)


def submit(environment: dict[str, str], directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "cpulaunch", "submit", *words]
    return subprocess.run(
        argv, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )


@pytest.mark.parametrize("case", JOBS)
def test_a_script_equals_the_golden_text(case: str, environment: dict[str, str], tmp_path: Path) -> None:
    to = case.partition("-")[0]
    words = ("--to", to, "--dry-run", "--lscpu", "lscpu", *JOBS[case].split(), "train.py", "--lr", "0.1")
    done = submit(environment, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace(sys.executable, "/venv/bin/python")
    path = GOLDEN / f"{case}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    ranks = "7 ranks" if case == "lsf" else "8 ranks" if "2" in JOBS[case] else "4 ranks"
    assert f"{ranks} on 4 hosts (node[1-4])" in done.stderr


@pytest.mark.parametrize("to", ["pbs", "lsf", "flux"])
def test_a_job_is_submitted_and_followed_to_its_end(
    to: str, environment: dict[str, str], tmp_path: Path
) -> None:
    done = submit(environment, tmp_path, "--to", to, "--follow", "train.py")
    assert done.returncode == 5, done.stderr
    assert "7" in done.stderr


def test_lsf_needs_a_number_of_ranks_per_host(environment: dict[str, str], tmp_path: Path) -> None:
    done = submit(environment, tmp_path, "--to", "lsf", "-n", "8", "train.py")
    assert done.returncode == 2
    assert "hint: -R 'span[ptile=N]'" in done.stderr


def test_each_example_is_short_and_states_that_it_was_never_run() -> None:
    for path in HERE.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 120, path.name
        assert "never run on a real" in text


def test_the_clusters_page_submits_to_an_example_queue(environment: dict[str, str], tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text()
    (typed,) = re.findall(r"^cpulaunch submit (.*)$", page, re.M)
    done = submit(environment, tmp_path, *typed.split())
    assert done.returncode == 0, done.stderr
    assert "PBS job 7.server" in done.stderr
