"""Instances on the nodes of an allocation, started by a real srun."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.command import clean_environment
from support.slurm import CPUS, Queue

from slurm.conftest import CPULAUNCH, HOSTS, Run

pytestmark = pytest.mark.slow

SHOW = """
import glob, json, os, socket, sys, time
number = os.environ["CPULAUNCH_INSTANCE"]
if "fail" in sys.argv:
    if number == "1":
        raise ValueError("no luck")
    while not any('"exit"' in open(file).read() for file in glob.glob("runs/*/events.jsonl")):
        time.sleep(0.05)
of_ranks = [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")]
print(json.dumps([int(number), os.environ["CPULAUNCH_INSTANCES"], socket.gethostname(), of_ranks]))
print("CPULAUNCH_METRIC throughput=10 samples/s")
"""


@pytest.fixture
def infer(tmp_path: Path) -> str:
    (tmp_path / "infer.py").write_text(SHOW)
    return "infer.py"


def said(text: str) -> list[list[object]]:
    """Return the output of instances: their number, their count, their host, and variables of ranks."""
    return sorted(map(json.loads, re.findall(r'\[\d+, ".*\]$', text, re.M)))


def test_instances_run_on_all_nodes_and_continue_if_one_fails(
    salloc: Run, infer: str, tmp_path: Path
) -> None:
    done = salloc(f"-N4 -c {CPUS}", "run", "--launcher", "slurm", "--instances", "4", infer, "fail")
    assert done.returncode == 1, done.stderr
    assert said(done.stdout) == [[number, "4", HOSTS[number], []] for number in (0, 2, 3)]
    assert re.search("instance 1 on node1 failed.*ValueError: no luck", done.stderr, re.S)
    assert "cpulaunch: throughput  30 samples/s in all (3 instances, 10 to 10)" in done.stderr
    (log,) = tmp_path.glob("runs/*/instance-1.log")
    assert "no luck" in log.read_text()


@pytest.mark.repeats
def test_as_many_as_fit_run_on_each_node(salloc: Run, infer: str) -> None:
    options = ("--launcher", "slurm", "--cores-per-instance", "1")
    done = salloc("-N2 -c 1", "run", *options, infer)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == [[0, "2", "node0", []], [1, "2", "node1", []]]


def test_a_submitted_job_may_have_instances(queue: Queue, infer: str, tmp_path: Path) -> None:
    environ = clean_environment(LC_ALL="C.UTF-8", **queue.environment)
    command = [*CPULAUNCH, "submit", "--nodes", "2", "--follow", "--instances", "2", infer]
    done = queue.run("login", command, directory=tmp_path, env=environ, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = {path.name: path.read_text() for path in tmp_path.glob("runs/*/instance-*.log")}
    assert sorted(said("".join(logs.values()))) == [[0, "2", "node0", []], [1, "2", "node1", []]]
