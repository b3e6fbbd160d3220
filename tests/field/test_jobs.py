"""Commands don't act on a job that nobody chose, and don't report a job that can't be reached as dead."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.conftest import ask, env
from support.command import TIMEOUT, clean_environment
from support.jobs import job, outcome
from support.namespaces import until
from support.running_jobs import SLEEPS, Ask, directory_of

__all__ = ["ask", "env"]


def test_without_a_name_profile_requires_a_single_job_in_this_directory(
    env: dict[str, str], ask: Ask, tmp_path: Path
) -> None:
    (project := tmp_path / "project").mkdir()
    (other := tmp_path / "other").mkdir()
    with job(other, env, [], SLEEPS) as elsewhere:
        there = directory_of(other)
        none = ask("profile", cwd=project)
        assert none.returncode == 2
        assert "no job of yours is running in runs/" in none.stderr
        assert there.name in none.stderr
        with job(project, env, [], SLEEPS) as launcher:
            assert f"cpulaunch: profile of {directory_of(project)}\n" in ask("profile", cwd=project).stderr
            with job(project, env, [], SLEEPS) as second:
                several = ask("profile", cwd=project)
                assert several.returncode == 2
                assert "several jobs of yours are running here" in several.stderr
                assert ask("stacks", cwd=project).returncode == 0  # allowed, because it doesn't change a job
                (project / "go").touch()
                assert second.wait(TIMEOUT) == launcher.wait(TIMEOUT) == 0
        (other / "go").touch()
        assert elsewhere.wait(TIMEOUT) == 0


SAVES = """
import pathlib, signal, time
def save(*_):
    pathlib.Path("saving").touch()
    time.sleep(60)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


def test_ranks_that_exceed_the_grace_period_are_reported_as_killed(
    env: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--grace-period", "0.5", "--backend", "gloo", "--precision", "fp32"]
    with job(tmp_path, env, options, SAVES) as launcher:
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(TIMEOUT) == 128 + signal.SIGTERM
    said = capfd.readouterr().err
    assert "ranks 0-1 had not ended after 0.5 s and were killed" in said
    assert [rank["status"] for rank in outcome(tmp_path)["ranks"]] == ["killed by launcher"] * 2


@pytest.mark.parametrize(("launcher", "worlds"), [("local", 2), ("mpirun", 1)])
def test_ranks_that_each_form_their_own_mpi_world_are_reported(
    launcher: str, worlds: int, env: dict[str, str], ask: Ask, tmp_path: Path
) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "sum.py").write_text("from mpi4py import MPI\nprint('world of', MPI.COMM_WORLD.size)")
    options = (
        "--launcher",
        launcher,
        "-n",
        "2",
        "--oversubscribe",
        "--backend",
        "gloo",
        "--precision",
        "fp32",
    )
    done = ask("run", *options, "--tee", "all", "sum.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] world of {2 // worlds}" for rank in (0, 1)]
    assert ("each of the 2 ranks is an MPI world of its own" in done.stderr) is (worlds == 2)


@pytest.mark.parametrize("command", ["jobs", "stacks", "profile"])
def test_a_job_in_another_network_namespace_is_not_reported_as_dead(
    command: str, env: dict[str, str], tmp_path: Path
) -> None:
    inside = ["unshare", "--net", sys.executable, "-m", "cpulaunch", command]
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("only root can make network namespaces")
    with job(tmp_path, env, [], SLEEPS) as launcher:
        until(lambda: (directory_of(tmp_path) / "control.json").exists(), "the job to be announced")
        done = subprocess.run(
            inside, cwd=tmp_path, env=clean_environment(**env), capture_output=True, text=True,
            timeout=TIMEOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert "can't be reached from here" in done.stdout + done.stderr
        assert "another network namespace" in done.stdout + done.stderr
        assert "left behind" not in done.stdout + done.stderr
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0


def test_a_job_without_its_log_directory_is_listed_with_the_others(
    env: dict[str, str], ask: Ask, tmp_path: Path
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    (project := tmp_path / "project").mkdir()
    (project / "script.py").write_text("print('ran')\n")
    (project / "runs").write_text("not a directory")
    (project / "logs").write_text("neither")
    env["TMPDIR"] = str(temporary)
    for options in ([], ["--log-dir", "logs"]):
        words = ["run", "-n", "1", "--backend", "gloo", "--precision", "fp32", *options, "script.py"]
        done = subprocess.run(
            [sys.executable, "-m", "cpulaunch", *words], cwd=project, env=env, text=True,
            capture_output=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    for named in ([], ["logs"]):
        listed = [line.split()[0] for line in ask("jobs", *named, cwd=project).stdout.splitlines()]
        assert len(listed) == 1
        assert Path(listed[0]).parent.parent == temporary
        shown = ask("logs", Path(listed[0]).name if not named else listed[0], cwd=project)
        assert (shown.returncode, "ran" in shown.stdout) == (0, True), shown.stderr
    assert "no running job of yours" in ask("jobs", cwd=tmp_path).stdout
