"""Hosts with names that can reach each other only over IPv6, with each launcher."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import clean_environment, launcher_options
from support.faults import Cluster
from support.jobs import outputs
from support.marks import repeat
from support.namespaces import NETWORK_6, until

from cluster.conftest import GONE_WITHIN, need_cluster
from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

MEET = """
import json, os, socket, torch, torch.distributed as dist
dist.init_process_group()
dist.all_reduce(x := torch.ones(300_000))
print(json.dumps([socket.gethostname(), os.environ["MASTER_ADDR"], x[0].item()]), flush=True)
"""


@pytest.fixture(scope="module")
def the_hosts() -> Iterator[Cluster]:
    need_cluster()
    with Cluster(("login", "node0", "node1"), NETWORK_6) as hosts:
        yield hosts


def run(hosts: Cluster, directory: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    (directory / "meet.py").write_text(MEET)
    argv = [sys.executable, "-m", "cpulaunch", "run", "--hosts", "node0,node1", "-ppn", "1", "--tee", "all"]
    done = hosts.run("login", [*argv, *options, "meet.py"], directory=directory, env=clean_environment(**env))
    until(lambda: not hosts.processes(), "all processes to end", limit=GONE_WITHIN)
    return done


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        repeat("ssh", "ccl"),
        ("ssh", "gloo"),
        ("intel", "ccl"),
        repeat("intel", "gloo"),
        repeat("openmpi", "ccl"),
    ],
)
def test_ranks_can_meet_over_ipv6(launcher: str, backend: str, the_hosts: Cluster, tmp_path: Path) -> None:
    done = run(the_hosts, tmp_path, *launcher_options(launcher), "--backend", backend)
    master = the_hosts.addresses["node0"]
    assert outputs(done) == [["node0", master, 2.0], ["node1", master, 2.0]]


def test_mpich_is_refused_for_ipv6_hosts(the_hosts: Cluster, tmp_path: Path) -> None:
    done = run(the_hosts, tmp_path, *launcher_options("mpich"))
    assert done.returncode == 2
    assert "mpiexec of mpich needs IPv4, but node1 is reached by IPv6" in done.stderr
    assert "hint: use --launcher ssh" in done.stderr
