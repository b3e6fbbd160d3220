"""Jobs that continue without a lost host, or with a spare host instead."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import bounded, clean_environment, mpi_options
from support.faults import Cluster
from support.jobs import outcome
from support.marks import repeat
from support.namespaces import until

from cluster.conftest import HOSTS, need_cluster
from cpulaunch.model.hosts import fold_hosts

pytestmark = pytest.mark.slow

LIMIT = 90.0
OPTIONS = ("--heartbeat-timeout", "5", "--grace-period", "1", "--max-restarts", "2", "--backend", "gloo")

# The first attempt records five steps and sleeps; the second attempt makes a process group.
PROGRAM = """
import json, os, time
from cpulaunch import ledger
header = ledger.MAGIC, ledger.HAS_OPTIMIZER, 5, 0, time.monotonic_ns(), 0, 0
ledger.PROGRESS.pack_into(ledger.of_this_process, 0, *header)
if os.environ["CPULAUNCH_RESTART_COUNT"] == "0":
    print("ready", flush=True)
    time.sleep(600)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(ones := torch.ones(1))
names = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"
print(json.dumps({"met": int(ones), **{name: os.environ[name] for name in names}}), flush=True)
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Hosts for a single test, because a host that was switched off stays off.

    The test must leave no process on them.
    """
    need_cluster()
    with Cluster(("login", *HOSTS)) as cluster:
        yield cluster
        until(lambda: not cluster.processes(), "all processes to end")


class Ended:
    """The result of a job whose host ``gone`` was switched off when all ranks were ready."""

    def __init__(self, cluster: Cluster, directory: Path, gone: str, *options: str) -> None:
        (directory / "train.py").write_text(PROGRAM)
        hostfile = str(cluster.hostfile(directory / "hosts", HOSTS))
        argv = [sys.executable, "-m", "cpulaunch", "run", "-f", hostfile, "-ppn", "1", "--tee", "all"]
        argv += [*OPTIONS, *options, "train.py"]
        job = cluster.start("login", argv, directory=directory, env=clean_environment())
        with bounded(job, LIMIT):
            assert job.stdout
            ranks = 3 if "3" in options else 4
            ready = [job.stdout.readline() for _ in range(ranks)]
            assert all(line.endswith("ready\n") for line in ready), job.communicate()[1]
            cluster.power_off(gone)
            stdout, self.stderr = job.communicate()
            self.code = job.returncode
        self.said = [json.loads(line.partition("] ")[2]) for line in stdout.splitlines()]
        self.outcome: dict[str, Any] = outcome(directory)
        (self.directory,) = directory.glob("runs/*")

    @property
    def told(self) -> list[str]:
        lines = [line.removeprefix("cpulaunch: ") for line in self.stderr.splitlines()]
        return [line for line in lines if line.startswith(("rank ", "restart ", "the job can't"))]


@pytest.mark.parametrize(
    ("mpi", "gone"), [repeat("intel", "node1"), ("mpich", "node0"), repeat("openmpi", "node3")]
)
def test_a_job_continues_without_a_lost_host(mpi: str, gone: str, cluster: Cluster, tmp_path: Path) -> None:
    """This includes the loss of the first host, where the ranks meet."""
    ended = Ended(cluster, tmp_path, gone, "--nnodes", "3:4", *mpi_options(mpi))
    assert ended.code == 0, ended.stderr
    left = [host for host in HOSTS if host != gone]
    happened, next_one = ended.told
    assert f"no sign of life from host {gone}" in happened
    assert ", at step 5" in happened
    names = fold_hosts(left)
    assert next_one.startswith(f"restart 1 of 2: 3 ranks on {names}, without {gone} (plan-1.json)")
    attempts = [(attempt["kind"], attempt["hosts"]) for attempt in ended.outcome["attempts"]]
    assert attempts == [("node_lost", list(HOSTS)), ("ok", left)]
    assert (ended.outcome["kind"], ended.outcome["restarts"]) == ("ok", 1)
    assert [rank["host"] for rank in ended.outcome["ranks"]] == left
    plan = json.loads((ended.directory / "plan-1.json").read_text())
    assert [host["host"] for host in plan["hosts"]] == left
    assert [said["met"] for said in ended.said] == [3] * 3
    assert (
        {said["MASTER_ADDR"] for said in ended.said} == {plan["master_addr"]} == {cluster.addresses[left[0]]}
    )


def test_a_spare_replaces_a_lost_host(cluster: Cluster, tmp_path: Path) -> None:
    ended = Ended(cluster, tmp_path, "node1", "--nnodes", "3", *mpi_options("intel"))
    assert ended.code == 0, ended.stderr
    assert ended.told[1].startswith(
        "restart 1 of 2: 3 ranks on node[0,2-3], without node1, with node3 (plan-1.json)"
    )
    assert [attempt["hosts"] for attempt in ended.outcome["attempts"]] == [
        ["node0", "node1", "node2"],
        ["node0", "node2", "node3"],
    ]


def test_with_too_few_hosts_left_the_job_ends(cluster: Cluster, tmp_path: Path) -> None:
    ended = Ended(cluster, tmp_path, "node2", *mpi_options("openmpi"))
    assert ended.code == 4, ended.stderr
    assert ended.told[1].startswith(
        "the job can't be started again: only 3 of the required 4 hosts remain (node2: "
    )
    assert (ended.outcome["kind"], ended.outcome["restarts"]) == ("node_lost", 0)
    assert "host node2 was lost" in ended.stderr
