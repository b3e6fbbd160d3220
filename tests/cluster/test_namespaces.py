"""The test cluster itself: its hosts behave like hosts, its faults take effect, and it leaves nothing behind."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY, bounded
from support.faults import Cluster
from support.marks import repeat

from cluster.conftest import need_cluster

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1"]

pytestmark = pytest.mark.slow


def test_hosts_have_their_own_names_addresses_and_shared_memory(cluster: Cluster) -> None:
    shell = "hostname; cat /proc/sys/kernel/random/boot_id; ls /dev/shm; echo $SSH_CONNECTION"
    cluster.run("node1", ["touch", "/dev/shm/mine"])
    try:
        told = [cluster.run("login", [*SSH, name, shell]).stdout.split() for name in ("node0", "node1")]
    finally:
        cluster.run("node1", ["rm", "/dev/shm/mine"])
    assert [t[0] for t in told] == ["node0", "node1"]
    assert told[0][1] != told[1][1]
    assert ["mine" in t for t in told] == [False, True]
    assert [t[-2] for t in told] == [cluster.addresses["node0"], cluster.addresses["node1"]]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        repeat("dropping", "timed out"),
        repeat("cut", "timed out"),
        ("without_sshd", "Connection refused"),
        repeat("unknown_key", "Host key verification failed"),
        repeat("changed_key", "IDENTIFICATION HAS CHANGED"),
        repeat("refusing_users", "Permission denied"),
    ],
)
def test_a_fault_shows_and_heals(cluster: Cluster, fault: str, says: str) -> None:
    with getattr(cluster, fault)("node2"):
        assert says in cluster.run("login", [*SSH, "node2", "true"]).stderr
        assert cluster.run("login", [*SSH, "node1", "true"]).returncode == 0
    assert cluster.run("login", [*SSH, "-o", "ConnectTimeout=5", "node2", "true"]).returncode == 0


def test_files_can_be_hidden_and_replaced_on_one_host(cluster: Cluster, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("everywhere")
    with cluster.replaced("node1", file, "other"):
        texts = [cluster.run(name, ["cat", file]).stdout for name in ("node0", "node1")]
    with cluster.hidden("node1", tmp_path):
        there = [cluster.run(name, ["ls", tmp_path]).stdout for name in ("node0", "node1")]
    assert texts == ["everywhere", "other"]
    assert there == ["file\n", ""]


def test_a_cluster_leaves_nothing_behind() -> None:
    need_cluster()
    before = _machine()
    with Cluster(("a", "b")) as cluster:
        cluster.power_off("b")
        assert "b" in cluster.run("a", [*SSH, "b", "true"]).stderr
    assert not cluster.directory.exists()
    assert _machine() == before


def test_the_script_starts_a_cluster_to_try(tmp_path: Path) -> None:
    need_cluster()
    script = REPOSITORY / "scripts" / "play_cluster.sh"
    shell = 'cluster node1 hostname; cluster ps; cat "$HOSTFILE"; cluster login ssh node0 pwd'
    argv = [script, "--hosts", "2", "sh", "-c", shell]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stdout.split() == ["node1", "node0", "node1", pwd.getpwuid(0).pw_dir], done.stderr


def test_ctrl_c_reaches_the_command_on_the_host(tmp_path: Path) -> None:
    need_cluster()
    script = REPOSITORY / "scripts" / "play_cluster.sh"
    there = "trap 'echo ended by itself; exit 7' INT; echo up; while :; do sleep 0.1; done"
    shell = f'trap : INT; cluster node0 bash -c "{there}"; echo "code $?"; cluster login cluster ps'
    started = subprocess.Popen(
        [script, "--hosts", "1", "bash", "-c", shell],
        env={**os.environ, "PYTHON": sys.executable},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # as a terminal's foreground job, whose processes all get Ctrl-C
    )
    with bounded(started) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate()
    assert out.splitlines() == ["ended by itself", "code 7"], err
    assert "you are on the host login" in err
    assert "Traceback" not in err


def _machine() -> list[str]:
    """The state of this machine that a cluster could have changed."""
    links = subprocess.run(["ip", "-brief", "address"], capture_output=True, text=True, timeout=10).stdout
    mounts = Path("/proc/self/mounts").read_text()
    sshd = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, timeout=10).stdout
    return [links, mounts, str(sshd.count("sshd")), Path("/etc/hosts").read_text(), os.uname().nodename]
