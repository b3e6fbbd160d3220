"""Kubernetes jobs written by `cpulaunch submit`.  Hosts of the test cluster take the place of pods."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import REPOSITORY, bounded, launcher_options, mpi_options, needs_two_cores
from support.marks import repeat
from support.namespaces import until
from support.pods import Pods, TrainerPods

from cluster.conftest import GONE_WITHIN, need_cluster
from cpulaunch.cli.main import main

pytestmark = pytest.mark.slow


def manifest(*options: str, to: str = "kubernetes") -> list[dict[str, Any]]:
    """The printed document of a job with two workers that have one CPU each."""
    words = ["--image", "train:1", "--namespace", "ml", "--job-name", "job", "--nodes", "2"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["submit", "--to", to, "--dry-run", *words, *options]) == 0
    return list(yaml.safe_load_all(printed.getvalue()))


@needs_two_cores
@pytest.mark.parametrize(
    ("to", "launcher", "first"),
    [
        ("kubernetes", "intel", "job-worker-0.job.ml.svc"),
        repeat("kubernetes", "mpich", "job-worker-0.job.ml.svc"),
        repeat("kubernetes", "openmpi", "job-worker-0.job.ml.svc"),
        ("trainjob", "ssh", "job-node-0-0.job"),
        repeat("trainjob", "intel", "job-node-0-0.job"),
        repeat("trainjob", "openmpi", "job-node-0-0.job"),
    ],
)
def test_the_launchers_command_waits_for_its_workers_and_trains(
    to: str, launcher: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cluster()
    monkeypatch.chdir(REPOSITORY / "examples")
    started_by = launcher_options(launcher)
    job = manifest(*started_by, "--cpu", "1", "--memory", "2Gi", "digits.py", "--epochs", "5", to=to)
    with TrainerPods(job) if to == "trainjob" else Pods(job) as pods:
        with bounded(pods.start_launcher()) as started:
            assert started.stderr
            said = iter(started.stderr.readline, "")
            waits = next(line for line in said if "waiting for" in line)
            assert f"waiting for 2 of 2 workers, for 300 s at most: {first}: " in waits
            pods.start_workers()
            printed, rest = started.communicate(timeout=60)
        assert started.returncode == 0, rest
        placed = dict(re.findall(r"\[(\d)\] rank \1 of 2: backend ccl, .*CPUs \[(\d+)\]", printed))
        assert placed == {str(n): str(*pods.cpus(worker)) for n, worker in enumerate(pods.workers)}
        (accuracy,) = re.findall(r"test accuracy (\d+\.\d+)%", printed)
        assert float(accuracy) > 95
        until(lambda: not pods.processes(), "all processes to end", limit=GONE_WITHIN)


@needs_two_cores
@pytest.mark.parametrize("mpi", ["intel", repeat("mpich"), repeat("openmpi")])
def test_the_launchers_pod_can_be_a_worker_too(
    mpi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with ``runLauncherAsWorker`` has the launcher's pod in the hostfile, but no sshd in this pod."""
    need_cluster()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "show.py").write_text("import os, socket\nprint(os.environ['RANK'], socket.gethostname())\n")
    tee = ("--set", "output.tee=all")
    job = manifest(*mpi_options(mpi), "--nodes", "1", "--cpu", "1", "--memory", "1Gi", *tee, "show.py")
    job[0]["spec"]["runLauncherAsWorker"] = True
    with Pods(job) as pods:
        with bounded(pods.start_launcher()) as launcher:
            assert launcher.stderr
            waits = next(line for line in iter(launcher.stderr.readline, "") if "waiting for" in line)
            assert "waiting for 1 of 1 worker, for 300 s at most: job-worker-0.job.ml.svc: " in waits
            pods.start_workers()
            printed, rest = launcher.communicate(timeout=60)
        assert launcher.returncode == 0, rest
        assert sorted(re.findall(r"\] (.*)", printed)) == ["0 job-launcher", "1 job-worker-0"], rest
        until(lambda: not pods.processes(), "all processes to end", limit=GONE_WITHIN)


def test_a_host_without_the_jobs_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    need_cluster()
    monkeypatch.chdir(REPOSITORY / "examples")
    with Pods(manifest("--cpu", "1", "--memory", "1Gi", "digits.py")) as pods:
        pods.change_key(pods.workers[1])
        pods.start_workers()
        for worker in pods.workers:
            until(lambda worker=worker: pods.listens(worker), f"the sshd of {worker}")
        assert pods.ssh(pods.workers[0]).stdout == "1000\n"
        refused = pods.ssh(pods.workers[1])
        assert refused.returncode == 255
        assert "Host key verification failed" in refused.stderr
