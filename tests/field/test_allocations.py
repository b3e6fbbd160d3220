"""Jobs use the CPUs that Slurm allocated, and ignore a Slurm job that has ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.command import clean_environment, needs_two_cores
from support.jobs import output_of_one
from support.marks import repeat
from support.slurm import CPUS, Queue

from cpulaunch.discovery.batch.slurm_job import SlurmJob, restricted_to_job
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Cpu, Topology

SHOW = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("launcher", ["local", repeat("mpirun")])
def test_two_allocations_on_a_node_use_different_cpus(launcher: str, queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    one = ("--partition=spare", "--nodelist=node0", "--nodes=1", "--ntasks=1", f"--cpus-per-task={CPUS // 2}")
    argv = [sys.executable, "-m", "cpulaunch", "run", "-n", "1", "--launcher", launcher, "show.py"]
    seen = []
    with queue.allocation(*one) as first, queue.allocation(*one) as second:
        for job in (first, second):
            done = queue.run("node0", argv, directory=tmp_path, env=clean_environment(**job))
            seen.append(CoreSet(output_of_one(done)))
    assert all(seen)
    assert not seen[0] & seen[1]


@pytest.mark.slow
def test_a_slurm_job_that_has_ended_is_ignored(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    with queue.allocation("--nodes=2", "--ntasks=2") as job:
        pass
    for number in (job["SLURM_JOB_ID"], "99999"):
        env = clean_environment(**job | {"SLURM_JOB_ID": number})
        argv = [sys.executable, "-m", "cpulaunch", "run", "-n", "1", "show.py"]
        done = queue.run("node0", argv, directory=tmp_path, env=env)
        assert output_of_one(done)
        assert f"warning: $SLURM_JOB_ID={number} is " in done.stderr
        assert "gives 2 hosts" not in done.stderr


def test_slurm_numbers_cpus_socket_by_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine, CPUs with consecutive numbers are on different sockets."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    machine = Topology(tuple(Cpu(cpu, cpu % 4, socket=cpu % 2) for cpu in range(8)))
    job = SlurmJob("7", "RUNNING", {"node0": CoreSet([0, 1]), "node1": CoreSet([9])})
    assert restricted_to_job(machine, job, {"node0"}).allowed == CoreSet([0, 4])
    assert restricted_to_job(machine, job, {"elsewhere"}) == machine
    assert restricted_to_job(machine, None, {"node0"}) == machine
    beyond = restricted_to_job(machine, job, {"node1"})
    assert beyond.allowed == machine.allowed
    assert "but this host has fewer CPUs" in beyond.notes[-1]
    part = machine.restricted(CoreSet([2, 3]))
    assert restricted_to_job(part, job, {"node0"}) == part
