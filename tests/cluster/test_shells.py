"""Hosts with login shells that aren't POSIX shells, and a launcher that can't start ssh."""

from __future__ import annotations

import contextlib
import itertools
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import chaos
from support.command import clean_environment, launcher_options, mpi_options
from support.faults import Cluster
from support.jobs import outputs
from support.marks import by_launcher, repeat
from support.namespaces import until

from cluster.conftest import HOSTS, Run

pytestmark = pytest.mark.slow

SWEEP = """
import asyncio
from cpulaunch.launchers.reach import Ssh
from cpulaunch.supervise.attempts.sweep import sweep_hosts
print(asyncio.run(sweep_hosts({hosts}, "the-job", Ssh())))
"""


@pytest.fixture
def other_shell(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[None]:
    """Change the user's login shell on all hosts of the job, and on the launching host for ``everywhere``."""
    name, _, everywhere = request.param.partition(" ")
    path = shutil.which(name)
    if not path:
        pytest.skip(f"{name} is not installed")
    passwd = re.sub(r"(?m)^(root:.*):[^:]*$", rf"\1:{path}", Path("/etc/passwd").read_text())
    with contextlib.ExitStack() as stack:
        for host in (*HOSTS, *(["login"] if everywhere else [])):
            stack.enter_context(cluster.replaced(host, "/etc/passwd", passwd))
        told = cluster.run("login", ["ssh", HOSTS[1], "printenv SHELL"]).stdout
        assert told == f"{path}\n"
        yield


SHELLS = ("tcsh", "fish", "tcsh everywhere", "fish everywhere")
USUAL = [("openmpi", "tcsh"), ("ssh", "fish everywhere")]


@pytest.mark.parametrize(
    ("launcher", "other_shell"),
    by_launcher(itertools.product(chaos.LAUNCHERS, SHELLS), USUAL),
    indirect=["other_shell"],
)
def test_jobs_run_on_hosts_with_another_login_shell(
    launcher: str, other_shell: None, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    (show := tmp_path / "show.py").write_text("import json, socket; print(json.dumps(socket.gethostname()))")
    done = cpulaunch(
        "run", *launcher_options(launcher), "-f", four, "-ppn", "1", "--tee", "all", show, on="login"
    )
    assert outputs(done) == list(HOSTS)


@pytest.mark.parametrize(
    "other_shell",
    [repeat("tcsh"), repeat("fish"), repeat("tcsh everywhere"), "fish everywhere"],
    indirect=True,
)
def test_hosts_with_another_login_shell_are_swept(other_shell: None, cluster: Cluster) -> None:
    mark = clean_environment(CPULAUNCH_JOB_ID="the-job")
    left = [cluster.start(host, ["sleep", "300"], env=mark) for host in HOSTS]
    other = cluster.start(HOSTS[0], ["sleep", "300"], env=clean_environment(CPULAUNCH_JOB_ID="the-job-2"))
    try:
        until(lambda: sum("sleep 300" in line for line in cluster.processes()) == 5, "all to run")
        code = SWEEP.format(hosts=list(HOSTS))
        swept = cluster.run("login", [sys.executable, "-c", code], env=clean_environment())
        assert (swept.stdout, swept.stderr) == ("[]\n", "")
        for process in left:
            process.wait(timeout=10)
        assert other.poll() is None
    finally:
        for process in (*left, other):
            process.kill()
            process.communicate(timeout=10)


def test_a_launcher_that_cannot_start_ssh_warns_and_still_reports(cluster: Cluster, tmp_path: Path) -> None:
    """When a host is lost, the launcher has no descriptor left."""
    job = chaos.Job(cluster, tmp_path, mpi_options("intel"), "sleep", "", "none")
    job.start()
    job.ready()
    (launcher,) = map(
        int, Path(f"/proc/{job.launcher.pid}/task/{job.launcher.pid}/children").read_text().split()
    )
    resource.prlimit(launcher, resource.RLIMIT_NOFILE, (8, 8))
    with chaos.EVENTS["link cut"].happen(job, 1):
        result = job.end()
    assert (
        "processes may be left on node1, because ssh can't be started here: Too many open files"
        in result.stderr
    )
    assert "host node1 was lost" in result.stderr
    assert (result.exit_code, result.outcome["kind"]) == (4, "node_lost")
