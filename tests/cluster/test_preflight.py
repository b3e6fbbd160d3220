"""`cpulaunch hosts check` and the preflight of `run` report problems with the host's name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support.command import bounded
from support.faults import Cluster
from support.marks import repeat

import cpulaunch as package
from cluster.conftest import HOSTS, Run
from cpulaunch.discovery.host.libraries import find_libraries, import_directories, library_directories

PACKAGE = Path(package.__file__).parent
PROBE = PACKAGE / "discovery" / "probe" / "remote.py"

Fault = Callable[[Cluster, Path], AbstractContextManager[None]]

pytestmark = pytest.mark.slow


def torch_version_file() -> Path:
    for directory in sys.path:
        if (file := Path(directory, "torch", "version.py")).is_file():
            return file
    pytest.skip("no torch in this Python")


# Faults of node2, each with the expected message and remedy.
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "sshd is down": (lambda c, here: c.without_sshd("node2"), "Connection refused", "no sshd listens there"),
    "its key is unknown": (
        lambda c, here: c.unknown_key("node2"),
        "Host key verification failed",
        "ssh-keyscan node2 >> ~/.ssh/known_hosts",
    ),
    "its key has changed": (
        lambda c, here: c.changed_key("node2"),
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "ssh-keygen -R node2",
    ),
    "it wants a password": (
        lambda c, here: c.refusing_users("node2"),
        "Permission denied",
        "ssh-copy-id node2",
    ),
    "no Python": (
        lambda c, here: c.hidden("node2", Path(sys.executable).parent),
        f"there is no {sys.executable}",
        "install the same environment there",
    ),
    "no cpulaunch": (
        lambda c, here: c.hidden("node2", PACKAGE / "discovery"),
        "cpulaunch is not installed at the same path as here",
        "install the same environment there",
    ),
    "another torch": (
        lambda c, here: c.replaced("node2", torch_version_file(), "__version__ = '2.8.0'\n"),
        "torch 2.8.0, but ",
        "install the same version there",
    ),
    "another cpulaunch": (
        lambda c, here: c.replaced("node2", PACKAGE / "__init__.py", '__version__ = "0.0.1"\n'),
        "cpulaunch 0.0.1, code ",
        "install the same version there",
    ),
    "the same cpulaunch with other code": (
        lambda c, here: c.replaced(
            "node2", PACKAGE / "ledger.py", (PACKAGE / "ledger.py").read_text() + "#\n"
        ),
        f", but {package.__version__}, code ",
        "install the same version there",
    ),
    "no directory, nor script": (
        lambda c, here: c.hidden("node2", here.parent),
        "there is no directory",
        "copy it there, or share it over NFS",
    ),
    "its clock is ahead": (
        lambda c, here: c.replaced(
            "node2", PROBE, PROBE.read_text().replace("time.time()", "time.time() + 60")
        ),
        "its clock is 60 s ahead of this host's",
        "chrony",
    ),
}


# One fault each of ssh, files, versions and clocks.
USUAL = ("its key is unknown", "no Python", "the same cpulaunch with other code", "its clock is ahead")


@pytest.mark.parametrize("fault", [fault if fault in USUAL else repeat(fault) for fault in FAULTS])
def test_a_fault_is_named_with_its_host_and_its_remedy(
    fault: str, cluster: Cluster, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    make, what, remedy = FAULTS[fault]
    with make(cluster, tmp_path):
        done = cpulaunch("hosts", "check", "-f", four, on="login")
    assert done.returncode == 3, done.stderr
    assert what in done.stderr
    assert "✗ node2: " in done.stderr
    assert remedy in done.stderr
    further = [line for line in done.stderr.splitlines() if "✗" in line and what not in line]
    assert all(
        "✗ node2: cpulaunch " in line for line in further
    )  # this fault replaces the code only on node2
    ticks = [line.split()[:2] for line in done.stdout.splitlines()[1:]]
    assert ticks == [["✗" if name == "node2" else "✓", name] for name in HOSTS]


def test_four_healthy_hosts_are_ready(cluster: Cluster, cpulaunch: Run, four: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = cpulaunch("hosts", "check", "-f", four, "train.py", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.isascii()
    assert re.search(r"ranks would be started by \w+.* \(found on all hosts\)$", done.stdout)
    lines = [line.split() for line in done.stdout.splitlines()[1:-1]]
    assert [line[:4] for line in lines] == [
        ["ok", name, cluster.addresses[name], cluster.interfaces[name]] for name in HOSTS
    ]


@pytest.mark.parametrize("fault", ["dropping", repeat("cut")])
def test_a_host_that_does_not_answer_is_named(
    fault: str, cluster: Cluster, cpulaunch: Run, four: Path
) -> None:
    with getattr(cluster, fault)("node1"), getattr(cluster, fault)("node3"):
        done = cpulaunch("hosts", "check", "-f", four)
    assert done.returncode == 3
    for name in ("node1", "node3"):
        assert f"✗ {name}: ssh: connect to host {name} port 22: Connection timed out" in done.stderr
    assert "firewall" in done.stderr


def test_a_dead_first_host_is_reported(cluster: Cluster, cpulaunch: Run, four: Path) -> None:
    with cluster.without_sshd("node0"):
        done = cpulaunch("hosts", "check", "-f", four, on="login")
    assert done.returncode == 3
    assert "✗ node0: ssh: connect to host node0 port 22: Connection refused" in done.stderr
    assert done.stderr.count("✗") == 1


@pytest.mark.parametrize("hosts", [repeat("node0,nod1"), "nod1,node0"])
def test_an_unknown_host_name_is_reported_once(cluster: Cluster, cpulaunch: Run, hosts: str) -> None:
    done = cpulaunch("hosts", "check", "--hosts", hosts)
    assert done.returncode == 3
    assert "✗ nod1: ssh: Could not resolve hostname nod1" in done.stderr
    assert "is the name right?" in done.stderr
    assert done.stderr.count("✗") == 1  # the host isn't also reported as unreachable


@pytest.mark.parametrize(
    ("hosts", "hint"),
    [
        repeat("node1", "--skip-preflight starts the job anyway"),
        ("node0,node1", "--skip-preflight starts the job anyway; --exclude omits hosts"),
        repeat("nod1", None),
        ("node0,nod1", "--exclude omits hosts"),
    ],
)
def test_a_run_suggests_remedies_for_a_host(
    cluster: Cluster, cpulaunch: Run, tmp_path: Path, hosts: str, hint: str | None
) -> None:
    (code := tmp_path / "code").mkdir()
    (script := code / "train.py").write_text("")
    with cluster.hidden("node1", code):
        done = cpulaunch("run", "--hosts", hosts, script, on="login")
    assert done.returncode == 3
    assert (f"✗ node1: there is no {script}" in done.stderr) == ("node1" in hosts)
    hints = [line for line in done.stderr.splitlines() if "hint: " in line]
    assert hints == ([f"cpulaunch: hint: {hint}"] if hint else [])


def test_two_names_of_this_host_are_an_error(cluster: Cluster, cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = cpulaunch("run", "--hosts", f"node0,node1,{cluster.addresses['node0']}", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"node0 and {cluster.addresses['node0']} are both this machine" in done.stderr


def test_a_master_port_in_use_is_reported(cluster: Cluster, cpulaunch: Run, four: Path) -> None:
    code = "import signal, socket; s = socket.create_server(('', 29511)); print('up', flush=True); signal.pause()"
    with bounded(cluster.start("node0", [sys.executable, "-c", code])) as taken:
        assert taken.stdout
        assert taken.stdout.readline() == "up\n"
        done = cpulaunch("hosts", "check", "-f", four, "--set", "hosts.master_port=29511", on="login")
    assert done.returncode == 3
    assert "✗ node0: port 29511: Address already in use" in done.stderr
    assert "without --master-port and $MASTER_PORT, each takes a free one" in done.stderr


def test_a_firewall_between_hosts_is_reported(cluster: Cluster, cpulaunch: Run, four: Path) -> None:
    """This host can reach node2 by ssh, but node2 can't reach the master."""
    with cluster.unroutable("node2", "node0"):
        done = cpulaunch("hosts", "check", "-f", four, on="login")
    assert done.returncode == 3
    assert "✗ node2: can't connect to node0, where the ranks meet: " in done.stderr


@pytest.mark.parametrize("port", ["auto", repeat("29512")])
def test_a_master_address_of_another_host_is_reported(
    port: str, cluster: Cluster, cpulaunch: Run, four: Path
) -> None:
    address = cluster.addresses["node1"]
    options = ("--set", f"hosts.master_addr={address}", "--set", f"hosts.master_port={port}")
    done = cpulaunch("hosts", "check", "-f", four, *options, on="login")
    assert done.returncode == 3
    assert f"✗ node0: can't connect to {address}, where the ranks meet: Connection refused" in done.stderr
    assert "use --master-addr auto, which selects an address of node0" in done.stderr
    assert done.stderr.count("✗") == 1  # the address isn't also reported as unreachable from each host


def test_an_interface_that_a_host_lacks_is_reported(cluster: Cluster, cpulaunch: Run, four: Path) -> None:
    done = cpulaunch("hosts", "check", "-f", four, "--interface", "eth0")
    assert done.returncode == 3
    assert "✗ node3: has no interface eth0 with an address; it has docker0, ens5, lo" in done.stderr


def test_output_of_a_startup_file_does_no_harm(cluster: Cluster, cpulaunch: Run, four: Path) -> None:
    """Even a non-interactive ssh session reads ~/.bashrc."""
    home = Path.home() / ".bashrc"
    if not home.exists():
        pytest.skip("no ~/.bashrc to replace")
    text = (
        "echo welcome to node2; echo 'cpulaunch-answer: hm' >&2; export PATH=/nowhere PYTHONPATH=/nowhere\n"
    )
    with cluster.replaced("node2", home, text):
        assert cluster.run("node0", ["ssh", "node2", "true"]).stdout == "welcome to node2\n"
        done = cpulaunch("hosts", "check", "-f", four)
    assert done.returncode == 0, done.stderr


def test_a_job_can_be_planned_elsewhere_from_recorded_facts(
    cluster: Cluster, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    facts = tmp_path / "facts.json"
    assert cpulaunch("hosts", "check", "-f", four, "--facts-out", facts).returncode == 0
    (tmp_path / "train.py").write_text("")
    argv = [
        sys.executable,
        "-m",
        "cpulaunch",
        "run",
        "--facts",
        facts,
        "-ppn",
        "2",
        "--dry-run",
        "--format",
        "json",
    ]
    # This runs on the test machine, which can't reach the hosts.
    done = subprocess.run(
        [*argv, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        stdin=subprocess.DEVNULL,
    )
    plan = json.loads(done.stdout)
    assert plan["master_addr"] == cluster.addresses["node0"]
    assert [host["host"] for host in plan["hosts"]] == list(HOSTS)
    assert not any(host["assumed"] for host in plan["hosts"])
    assert [host["env"]["GLOO_SOCKET_IFNAME"] for host in plan["hosts"]] == ["eth0", "eth0", "eth0", "ens5"]
    # All hosts share the test machine's file system, and therefore have the same libraries.
    libraries = [host["libraries"] for host in json.loads(facts.read_text())["hosts"].values()]
    assert libraries == [find_libraries(library_directories(), import_directories())] * 4
    assert "torch" in libraries[0]


def test_run_does_not_start_if_a_host_is_not_ready(
    cluster: Cluster, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    with cluster.unknown_key("node2"):
        done = cpulaunch("run", "-f", four, "-ppn", "1", "--mpi", "intel", "train.py")
    assert done.returncode == 3
    assert done.stdout == ""
    assert "✗ node2: ssh: Host key verification failed" in done.stderr
    assert "cpulaunch: error: 1 of 4 hosts is not ready" in done.stderr
    assert not (tmp_path / "runs").exists()
