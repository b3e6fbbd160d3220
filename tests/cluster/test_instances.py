"""Instances on four hosts, started by a real mpiexec."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.command import mpi_options
from support.marks import repeat

from cluster.conftest import HOSTS, Run

pytestmark = pytest.mark.slow

SHOW = """
import glob, json, os, socket, time
number = os.environ["CPULAUNCH_INSTANCE"]
if number == "1":
    raise ValueError("no luck")
while not any('"exit"' in open(file).read() for file in glob.glob("runs/*/events.jsonl")):
    time.sleep(0.05)
print(json.dumps([number, os.environ["CPULAUNCH_INSTANCES"], socket.gethostname(), "RANK" in os.environ]))
print("CPULAUNCH_METRIC throughput=10 samples/s")
"""


@pytest.mark.parametrize("flavour", ["intel", repeat("mpich"), repeat("openmpi")])
def test_instances_run_on_all_hosts_and_outlive_a_failed_instance(
    flavour: str, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    (tmp_path / "infer.py").write_text(SHOW)
    done = cpulaunch("run", *mpi_options(flavour), "-f", four, "--instances", "4", "infer.py")
    assert done.returncode == 1, done.stderr
    assert done.stdout, done.stderr
    said = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if "METRIC" not in line]
    assert sorted(said) == [[number, "4", HOSTS[int(number)], False] for number in "023"]
    assert re.search("instance 1 on node1 failed.*ValueError: no luck", done.stderr, re.S)
    assert "cpulaunch: throughput  30 samples/s in all (3 instances, 10 to 10)" in done.stderr


def test_a_single_chosen_instance_runs_on_its_host(cpulaunch: Run, four: Path, tmp_path: Path) -> None:
    (tmp_path / "infer.py").write_text(
        "import os, socket\nprint(os.environ['CPULAUNCH_INSTANCE'], socket.gethostname())"
    )
    done = cpulaunch("run", "-f", four, "--instances", "8", "--instance", "5", "infer.py", on="login")
    assert (done.returncode, done.stdout) == (0, "5 node2\n"), done.stderr
