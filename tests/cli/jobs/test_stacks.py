"""``cpulaunch stacks``, ``profile`` and ``logs`` for real jobs while they run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.command import TIMEOUT, bounded
from support.jobs import job, outcome
from support.marks import usually_under
from support.running_jobs import SLEEPS, Ask, directory_of

from cli.conftest import popen

needs_py_spy = pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")


@needs_py_spy
@usually_under("local", "openmpi")
def test_stacks_of_all_ranks_are_shown_without_disturbing_the_job(
    launcher_options: list[str], env: dict[str, str], ask: Ask, tmp_path: Path
) -> None:
    with job(tmp_path, env, launcher_options, SLEEPS) as launcher:
        for arguments in (
            [],
            [directory_of(tmp_path)],
            ["runs", "--native"],
            [directory_of(tmp_path).name[:20]],
        ):
            done = ask("stacks", *arguments)
            assert done.returncode == 0, done.stderr
            called = "clock_nanosleep ←" if "--native" in arguments else "{} at"
            assert f"[1] {called.format('load_batch')} program.py:3\n" in done.stdout
            assert f"[0] {called.format('wait_for_all')} program.py:5\n" in done.stdout
            assert "bootstrap.py" not in done.stdout
        (tmp_path / "go").touch()
        assert launcher.stdout
        assert sorted(launcher.stdout.read().splitlines()) == ["[0] done", "[1] done"]
        assert launcher.wait(TIMEOUT) == 0
    assert [rank["status"] for rank in outcome(tmp_path)["ranks"]] == ["exit 0", "exit 0"]
    assert not (directory_of(tmp_path) / "control.json").exists()
    assert list(Path(env["XDG_RUNTIME_DIR"]).rglob("*.json")) == []


def test_a_single_started_instance_is_shown_with_its_number(
    env: dict[str, str], ask: Ask, tmp_path: Path
) -> None:
    program = SLEEPS.replace('"RANK"', '"CPULAUNCH_INSTANCE"').replace(
        'print("ready"', 'print("CPULAUNCH_METRIC throughput=7 samples/s"); print("ready"'
    )
    (tmp_path / "program.py").write_text(program)
    words = ("run", "--instances", "2", "--instance", "1", "program.py")
    with bounded(popen(tmp_path, env, *words, stderr=subprocess.DEVNULL)) as launcher:
        assert launcher.stdout
        assert "ready\n" in iter(launcher.stdout.readline, "")
        assert " 1 instance · " in (line := ask("jobs").stdout.splitlines()[0])
        assert line.endswith(" · throughput 7 samples/s so far")
        done = ask("stacks")
        assert re.search(r"^\[1\] ", done.stdout, re.M), done
        assert "[0]" not in done.stdout
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0


@needs_py_spy
def test_two_simultaneous_requests_are_both_answered(env: dict[str, str], tmp_path: Path) -> None:
    with job(tmp_path, env, [], SLEEPS) as launcher:
        asking = [popen(tmp_path, env, "stacks", *native) for native in ([], ["--native"], ["--native"])]
        for each in asking:
            assert f"    load_batch  {tmp_path}/program.py:3\n" in each.communicate(timeout=TIMEOUT)[0]
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0


@needs_py_spy
def test_without_a_name_commands_choose_the_newest_job_in_this_directory(
    env: dict[str, str], ask: Ask, tmp_path: Path
) -> None:
    """This holds for all commands about a single job, even if a newer job runs in another directory."""
    (project := tmp_path / "project").mkdir()
    (other := tmp_path / "other").mkdir()
    with job(project, env, [], SLEEPS) as launcher, job(other, env, [], SLEEPS) as newer:
        here = directory_of(project)
        assert ask("stacks", cwd=project).stdout.startswith(f"job {here.name} in ")
        assert f"cpulaunch: profile of {here}\n" in ask("profile", cwd=project).stderr
        with bounded(popen(project, env, "logs", "-f", stderr=subprocess.STDOUT)) as following:
            assert following.stdout
            assert following.stdout.readline() == f"cpulaunch: logs of runs/{here.name}\n"
            (project / "go").touch()
            assert launcher.wait(TIMEOUT) == 0
            assert following.wait(TIMEOUT) == 0
            assert sorted(following.stdout.read().splitlines()) == [
                "[0] done",
                "[0] ready",
                "[1] done",
                "[1] ready",
            ]
        for logs in (["logs"], ["logs", "-f"]):  # the job has ended
            assert ask(*logs, cwd=project).stderr == f"cpulaunch: logs of runs/{here.name}\n"
        # If no job runs or has run in this directory, the job running elsewhere is chosen, and named.
        (nowhere := tmp_path / "nowhere").mkdir()
        there = directory_of(other)
        assert ask("stacks", cwd=project).stdout.startswith(f"job {there.name} in {there}\n")
        assert ask("logs", cwd=nowhere).stderr == f"cpulaunch: logs of {there}\n"
        (other / "go").touch()
        assert newer.wait(TIMEOUT) == 0
