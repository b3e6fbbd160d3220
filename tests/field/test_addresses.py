"""Hosts get addresses at which they reach each other, whatever /etc/hosts and the user's variables say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.conftest import cluster, the_cluster
from support.command import Run, clean_environment
from support.faults import Cluster
from support.jobs import outcome
from support.marks import repeat

__all__ = ["cluster", "the_cluster"]

FAILS = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group()
dist.barrier()
print("met", flush=True)
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(300)
"""

On = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def on_node0(cluster: Cluster, tmp_path: Path) -> On:
    """A function that runs ``cpulaunch run`` on node0 with the given options and the script FAILS."""
    (tmp_path / "fails.py").write_text(FAILS)

    def run(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
        job = ("run", "-ppn", "1", "--precision", "fp32", *options, "fails.py")
        argv = [sys.executable, "-m", "cpulaunch", *job]
        environ = clean_environment(**{"LC_ALL": "C.UTF-8", **env})
        return cluster.run("node0", argv, timeout=90.0, directory=tmp_path, env=environ)

    return run


def own_name_first(cluster: Cluster, name: str) -> str:
    """Return /etc/hosts as Debian's installer writes it, with the host's own name as a loopback address."""
    others = "".join(f"{address} {other}\n" for other, address in cluster.addresses.items() if other != name)
    return f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}"


def check_rank_1_failed(done: subprocess.CompletedProcess[str], directory: Path) -> None:
    assert done.returncode == 7, done.stderr
    assert done.stdout.count("met") == 2
    found = outcome(directory)
    assert (found["first_failure"]["rank"], found["first_failure"]["exit_code"]) == (1, 7)
    assert [rank["status"] for rank in found["ranks"]] == ["ended by launcher", "exit 7"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "backend"), [("node0", "gloo"), repeat("node0", "ccl"), repeat("node1", "gloo")]
)
def test_a_host_whose_own_name_resolves_to_loopback_is_reached(
    host: str, backend: str, cluster: Cluster, on_node0: On, built, tmp_path: Path
) -> None:
    with cluster.replaced(host, "/etc/hosts", own_name_first(cluster, host)):
        done = on_node0("--hosts", "node0,node1", "--skip-preflight", "--backend", backend)
    check_rank_1_failed(done, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--skip-preflight",), repeat(())], ids=["unasked", "asked"])
def test_the_list_of_hosts_may_call_this_host_localhost(
    options: tuple[str, ...], on_node0: On, tmp_path: Path
) -> None:
    done = on_node0("--hosts", "localhost,node1", "--backend", "gloo", *options)
    check_rank_1_failed(done, tmp_path)


@pytest.mark.slow
def test_an_address_of_another_host_is_refused_before_anything_is_started(
    cluster: Cluster, on_node0: On
) -> None:
    for options in (("--skip-preflight",), ()):
        done = on_node0("--hosts", "node0,node1", *options, MASTER_ADDR=cluster.addresses["node1"])
        assert done.returncode == 2, done.stderr
        assert "is not the first host, node0, where the ranks meet" in done.stderr
        assert "$MASTER_ADDR" in done.stderr


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("b", "($MASTER_ADDR): b is not the first host, a, where the ranks meet"),
        ("localhost", "($MASTER_ADDR): localhost is a loopback address"),
        ("127.0.1.1", "($MASTER_ADDR): 127.0.1.1 is a loopback address"),
    ],
)
def test_a_dry_run_refuses_an_address_of_another_host_or_loopback(
    address: str, words: str, cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    done = cpulaunch("run", "--hosts", "a,b", "--dry-run", "train.py", env={"MASTER_ADDR": address})
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--hosts", "a,b"), "the ranks meet at a (a run takes the address of a that leads to the others)"),
        (("--hosts", "a,b", "--skip-preflight"), "the ranks meet at a"),
        (("--hosts", "a,b", "--master-addr", "10.0.0.7"), "the ranks meet at 10.0.0.7"),
    ],
)
def test_a_dry_run_shows_the_address_even_if_it_is_not_final(
    options: tuple[str, ...], line: str, cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    done = cpulaunch("run", *options, "--dry-run", "train.py")
    assert line in done.stdout.splitlines(), done.stdout + done.stderr


def test_a_first_host_that_this_machine_cannot_resolve_gives_a_warning(
    cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.py").touch()
    options = (
        "--launcher",
        "ssh",
        "--hosts",
        "first.invalid,second.invalid",
        "-ppn",
        "1",
        "--backend",
        "gloo",
    )
    warned = "this machine knows no address of first.invalid, where the ranks meet"
    done = cpulaunch("run", *options, "--skip-preflight", "a.py")
    assert (done.returncode, warned in done.stderr) == (3, True)
    named = cpulaunch("run", *options, "--skip-preflight", "--master-addr", "first.example", "a.py")
    assert (named.returncode, warned in named.stderr) == (3, False)
