"""The launcher ssh, for jobs on hosts without an MPI."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import chaos
from support.command import REPOSITORY, TIMEOUT, bounded, clean_environment
from support.faults import Cluster
from support.jobs import outcome, outputs
from support.marks import repeat
from support.namespaces import until

from cluster.conftest import HOSTS, Run

pytestmark = pytest.mark.slow

BY_SSH = ("--launcher", "ssh")
CONFIG = Path("/etc/ssh/ssh_config")
WHERE = "import json, socket; print(json.dumps(socket.gethostname()))"


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A script that prints its host."""
    (script := tmp_path / "where.py").write_text(WHERE)
    return script


def configured(cluster: Cluster, host: str, lines: str) -> str:
    """Return the ssh configuration of the host, with ``lines`` before the options for all hosts."""
    return lines + cluster.run(host, ["cat", str(CONFIG)]).stdout


@pytest.fixture
def base_install(tmp_path: Path) -> Path:
    """The Python of an environment with cpulaunch's dependencies but no MPI."""
    (home := tmp_path / "venv").mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=TIMEOUT)
    (packages,) = home.glob("lib/python3*/site-packages")
    ours = [str(REPOSITORY), *(path for path in sys.path if path.endswith("-packages"))]
    (packages / "ours.pth").write_text("\n".join(ours))
    return home / "bin" / "python"


def run_without_mpi(
    cluster: Cluster, python: Path, *words: object, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``cpulaunch run`` on the login host without an MPI on the PATH."""
    environ = clean_environment(PATH="/usr/sbin:/usr/bin:/sbin:/bin", PYTHONPATH="", **env)
    argv = [str(python), "-m", "cpulaunch", "run", *map(str, words)]
    return cluster.run("login", argv, directory=python.parents[2], env=environ)


def test_the_base_install_starts_ranks_on_several_hosts(
    cluster: Cluster, base_install: Path, four: Path, where: Path
) -> None:
    done = run_without_mpi(cluster, base_install, "-f", four, "-ppn", 1, where)
    assert outputs(done) == list(HOSTS)
    assert "started by ssh (no MPI was found here)" in done.stderr


def test_an_mpi_that_a_host_lacks_is_not_used(
    cluster: Cluster, base_install: Path, four: Path, where: Path, tmp_path: Path
) -> None:
    (mpi := tmp_path / "mpi" / "bin").mkdir(parents=True)
    (mpiexec := mpi / "mpiexec.hydra").write_text("#!/bin/sh\necho 'Intel(R) MPI Library, Version 2021.18'\n")
    mpiexec.chmod(0o755)
    root = str(mpi.parent)
    with cluster.hidden("node2", mpi):
        done = run_without_mpi(cluster, base_install, "-f", four, "-ppn", 1, where, I_MPI_ROOT=root)
    assert outputs(done) == list(HOSTS)
    assert f"started by ssh (node2: there is no {mpiexec})" in done.stderr


def test_a_job_survives_the_loss_of_an_ssh_connection(cluster: Cluster, tmp_path: Path) -> None:
    job = chaos.Job(cluster, tmp_path, BY_SSH, "sleep", "leave", "all")
    job.start()
    job.ready()

    def connected() -> bool:
        return any(" ssh -o" in line and " node1 " in line for line in cluster.processes("login"))

    assert connected()
    with cluster.without_sshd("node1", sessions=True):
        until(lambda: not connected(), "ssh to node1 to end", TIMEOUT)
        job.trigger()
        result = job.end()
    assert (result.exit_code, result.left) == (0, []), result.stderr
    assert {rank["status"] for rank in outcome(tmp_path)["ranks"]} == {"exit 0"}
    assert [attempt["waited"] for attempt in outcome(tmp_path)["attempts"]] == [[]]


def test_command_lines_do_not_show_variables(cluster: Cluster, tmp_path: Path) -> None:
    job = chaos.Job(
        cluster, tmp_path, (*BY_SSH, "-x", "SECRET"), "sleep", "leave", "all", env={"SECRET": "hunter2"}
    )
    job.start()
    job.ready()
    shown = cluster.processes()
    assert sum("run_agent.py" in line and "run_spawner" not in line for line in shown) == len(HOSTS)
    assert not any("hunter2" in line or "CPULAUNCH_" in line for line in shown)
    job.trigger()
    assert job.end().exit_code == 0


def test_ssh_connections_may_share_a_master_connection(
    cluster: Cluster, cpulaunch: Run, four: Path, where: Path, tmp_path: Path
) -> None:
    """The master stays for a while after the job, and doesn't count as a process of the job."""
    shared = f"ControlMaster auto\nControlPersist 60\nControlPath {tmp_path}/%h\n"
    with cluster.replaced("login", CONFIG, configured(cluster, "login", shared)):
        done = cpulaunch("run", *BY_SSH, "-f", four, "-ppn", "1", where, on="login")
        masters = [line for line in cluster.processes("login") if "[mux]" in line]
        for host in HOSTS:
            cluster.run("login", ["ssh", "-O", "exit", "-S", str(tmp_path / host), host], timeout=TIMEOUT)
    assert outputs(done) == list(HOSTS)
    assert len(masters) == len(HOSTS)


def test_ranks_can_run_on_hosts_behind_a_jump_host(
    cluster: Cluster, cpulaunch: Run, four: Path, where: Path
) -> None:
    jump = "Host node1 node2 node3\n  ProxyJump node0\n"
    with cluster.replaced("login", CONFIG, configured(cluster, "login", jump)):
        done = cpulaunch("run", *BY_SSH, "-f", four, "-ppn", "1", where, on="login")
    assert outputs(done) == list(HOSTS)


def test_few_open_files_suffice(cluster: Cluster, four: Path, where: Path, tmp_path: Path) -> None:
    run = f"ulimit -Sn 24; exec {sys.executable} -m cpulaunch run {' '.join(BY_SSH)} -f {four} -ppn 1 {where}"
    done = cluster.run("login", ["sh", "-c", run], directory=tmp_path, env=clean_environment())
    assert outputs(done) == list(HOSTS)


@pytest.mark.parametrize("reader", [repeat(0), 2])
def test_only_the_chosen_rank_gets_stdin(reader: int, cluster: Cluster, four: Path, tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text("import sys; print(len(sys.stdin.read()))")
    (tmp_path / "text").write_text("0123456789" * 50_000)
    options = f"{' '.join(BY_SSH)} -f {four} -ppn 1 --stdin {reader}"
    run = f"exec {sys.executable} -m cpulaunch run {options} count.py < text"
    done = cluster.run("login", ["sh", "-c", run], directory=tmp_path, env=clean_environment())
    assert outputs(done) == [500_000 if rank == reader else 0 for rank in range(4)]


def test_a_spawner_that_is_killed_is_named_and_its_ranks_are_ended(cluster: Cluster, tmp_path: Path) -> None:
    job = chaos.Job(cluster, tmp_path, BY_SSH, "sleep", "", "none")
    job.start()
    job.ready()
    (pid,) = [
        line.split()[1] for line in cluster.processes("login") if "run_spawner.py" in line and " -- " in line
    ]
    cluster.run("login", ["kill", "-KILL", pid])
    result = job.end()
    assert "ssh got SIGKILL, not from cpulaunch" in result.stderr
    assert (result.exit_code, result.left) == (137, [])


def test_a_launcher_and_a_spawner_killed_at_once_leave_no_processes(cluster: Cluster, tmp_path: Path) -> None:
    job = chaos.Job(cluster, tmp_path, BY_SSH, "sleep", "", "none")
    job.start()
    job.ready()
    pids = [line.split()[1] for line in cluster.processes("login") if "cpulaunch" in line]
    cluster.run("login", ["kill", "-KILL", *pids])
    assert job.end().left == []


def test_a_launcher_killed_before_its_agents_report_leaves_no_processes(
    cluster: Cluster, four: Path, tmp_path: Path
) -> None:
    """The launcher is stopped while the agents start, so they get no answer until it is killed."""
    (tmp_path / "sleep.py").write_text(
        "import os, time; open('started-' + os.environ['RANK'], 'w'); time.sleep(300)"
    )
    argv = [
        sys.executable,
        "-m",
        "cpulaunch",
        "run",
        *BY_SSH,
        "-f",
        str(four),
        "-ppn",
        "1",
        "--skip-preflight",
    ]
    argv += ["--grace-period", "0.5", "sleep.py"]
    with bounded(cluster.start("login", argv, directory=tmp_path, env=clean_environment())) as launcher:
        until(lambda: any("run_spawner" in line for line in cluster.processes("login")), "a spawner", TIMEOUT)
        cluster.signal(launcher, signal.SIGSTOP)
        started = [tmp_path / f"started-{rank}" for rank in range(4)]
        until(lambda: all(path.exists() for path in started), "all ranks to start", TIMEOUT)
        cluster.signal(launcher, signal.SIGKILL)
        launcher.send_signal(signal.SIGCONT)  # nsenter was stopped, too
        launcher.wait(TIMEOUT)
        until(lambda: not cluster.processes(), "all processes to end", TIMEOUT)


# Ends all processes of a session when the session ends, like systemd with KillUserProcesses=yes.
SCOPE = """
import contextlib, ctypes, os, signal, subprocess, time
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: whoever calls setsid stays a descendant
session = os.getppid()
child = subprocess.Popen(["sh", "-c", os.environ.get("SSH_ORIGINAL_COMMAND", "true")])

def descendants(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        for each in map(int, f.read().split()):
            yield each
            yield from descendants(each)

while child.poll() is None and os.getppid() == session:
    time.sleep(0.02)
with contextlib.suppress(ChildProcessError):  # none is left
    while True:
        with contextlib.suppress(OSError):  # one has just ended
            for pid in descendants(os.getpid()):
                os.kill(pid, signal.SIGKILL)
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        time.sleep(0.02)
os._exit(child.returncode or 0)
"""


def test_jobs_run_if_sessions_kill_their_processes_and_lost_sessions_are_named(
    cluster: Cluster, tmp_path: Path
) -> None:
    (scope := tmp_path / "scope.py").write_text(SCOPE)
    sshd = Path("/etc/ssh/sshd_config")
    text = cluster.run("node1", ["cat", str(sshd)]).stdout + f"ForceCommand {sys.executable} -I {scope}\n"
    with cluster.replaced("node1", sshd, text):
        with cluster.without_sshd("node1"):
            pass  # restarts sshd with the new configuration
        (first := tmp_path / "ends").mkdir()
        job = chaos.Job(cluster, first, BY_SSH, "sleep", "leave", "all")
        job.start()
        job.ready()
        job.trigger()
        result = job.end()
        assert (result.exit_code, result.left) == (0, []), result.stderr
        (second := tmp_path / "loses").mkdir()
        job = chaos.Job(cluster, second, BY_SSH, "sleep", "", "none")
        job.start()
        job.ready()
        with cluster.without_sshd("node1", sessions=True):
            result = job.end()
        assert "rank 1 on node1 failed first" in result.stderr
        assert (result.exit_code, result.left) == (137, []), result.stderr
    with cluster.without_sshd("node1"):
        pass
