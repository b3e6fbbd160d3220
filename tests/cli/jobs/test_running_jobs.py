"""``cpulaunch jobs`` lists real jobs while they run and after they have ended."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run
from support.jobs import job
from support.namespaces import until
from support.plans import make
from support.running_jobs import SLEEPS, Ask, directory_of

from cpulaunch.supervise.control.registry import (
    CONTROL_FILE,
    Announcement,
    Contact,
    listed_jobs,
    read_contact,
)
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.output.record import ended

NOTHING = "no running job of yours here, and no job in runs/\n"


def test_running_jobs_are_listed(env: dict[str, str], ask: Ask, tmp_path: Path) -> None:
    assert ask("jobs").stdout == NOTHING
    with job(tmp_path, env, [], SLEEPS) as launcher:
        directory = directory_of(tmp_path)
        (first, where, what) = ask("jobs").stdout.splitlines()
        assert first.startswith(f"{directory.name}  running · 1 host, 2 ranks · ")
        assert (where.strip(), what.split()[-1]) == (str(directory), "program.py")
        env["XDG_RUNTIME_DIR"] = str(tmp_path / "another")
        (tmp_path / "elsewhere").mkdir()
        assert ask("jobs", cwd=tmp_path / "elsewhere").stdout == NOTHING
        assert ask("jobs", "runs").stdout.splitlines()[1:] == [f"    {Path('runs', directory.name)}", what]
        env["XDG_RUNTIME_DIR"] = str(tmp_path / "runtime")
        # As if the job had been launched on another host with the same home directory.
        control = directory / "control.json"
        for file in (control, *Path(env["XDG_RUNTIME_DIR"]).rglob("*.json")):
            file.write_text(json.dumps({**json.loads(file.read_text()), "host": "another", "machine": "x"}))
        said = json.loads(control.read_text())
        assert ask("stacks").stdout.startswith(f"job {directory.name} in ")  # the job can be reached
        control.write_text(json.dumps({**said, "address": "@there"}))
        (other := tmp_path / "elsewhere" / "runs" / "other").mkdir(parents=True)
        (other / "control.json").write_text(json.dumps({**said, "job": "newer", "started": time.time()}))
        listed = {"schema": 1, "job": "newer", "directory": str(other), "host": "another", "machine": "x"}
        (Path(env["XDG_RUNTIME_DIR"]) / "cpulaunch/jobs/newer.json").write_text(json.dumps(listed))
        hint = f"`cpulaunch stacks {directory.name}` asks the job on another"
        assert (
            hint in ask("stacks").stderr
        )  # the hint doesn't name the newer job, which is in another directory
        control.write_text(json.dumps(said))
        shutil.rmtree(other)
        assert ask("jobs").stdout.splitlines()[0].endswith(" · launched on another")
        (tmp_path / "go").touch()
        launcher.wait(TIMEOUT)


def test_a_restart_does_not_make_a_job_newer(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", env["XDG_RUNTIME_DIR"])
    directory = JobDirectory.make(tmp_path / "runs" / "x")
    began = time.monotonic() - 3600
    announcement = Announcement(directory, "x", "@", "", make(), began)
    until(lambda: bool(listed_jobs(env)), "the job to be listed")
    contact = read_contact(directory.path)
    announcement.withdraw()
    assert contact
    assert contact.started < time.time() - 1800


def test_a_job_on_the_cores_of_another_one_gets_a_warning(
    env: dict[str, str], ask: Ask, tmp_path: Path
) -> None:
    with job(tmp_path, env, [], SLEEPS) as launcher:
        name = directory_of(tmp_path).name
        done = ask("run", "-n", "1", "--no-python", "--log-dir", "others", "true")
        assert re.search(
            rf"warning: cores \S+ are already in use by job {name}; --cores chooses others\n", done.stderr
        )
        unpinned = ask("run", "-n", "1", "--strategy", "none", "--no-python", "--log-dir", "others", "true")
        assert "already in use" not in unpinned.stderr
        (tmp_path / "go").touch()
        launcher.wait(TIMEOUT)
    assert "already in use" not in ask("run", "-n", "1", "--no-python", "true").stderr


def test_naming_a_job_that_does_not_exist_is_an_error(ask: Ask, tmp_path: Path) -> None:
    done = ask("stacks")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no job of yours is running on this host" in done.stderr
    assert "7: no such running job" in ask("stacks", "7").stderr
    assert "runtime: no job is running there" in ask("stacks", "runtime").stderr
    assert "no such running job" in ask("stacks", "7" * 300).stderr
    assert "run: no such directory" in ask("jobs", "run").stderr
    wrong = dict.fromkeys(("job", "pid", "host", "started", "address", "token", "command"), 7)
    for control in ("{}", "[]", '{"job": "x"', json.dumps(wrong)):
        (tmp_path / "runtime/control.json").write_text(control)
        assert "runtime: no job is running there" in ask("stacks", "runtime").stderr


def test_entries_of_dead_launchers_are_removed(env: dict[str, str], ask: Ask, tmp_path: Path) -> None:
    with job(tmp_path, env, [], SLEEPS) as launcher:
        (entry,) = Path(env["XDG_RUNTIME_DIR"]).rglob("*.json")
        said = json.loads(entry.read_text())
        # An entry with the pid of a running process that was started at another time.
        reused = entry.with_name("reused.json")
        reused.write_text(json.dumps({**said, "start": "1"}))
        elsewhere = entry.with_name("elsewhere.json")
        elsewhere.write_text(json.dumps({**said, "host": "another", "machine": "x", "directory": "/nowhere"}))
        # An entry of a launcher in a container on this host, which can't be inspected from outside.
        boot = said["machine"].split()[0]
        container = entry.with_name("container.json")
        container.write_text(json.dumps({**said, "machine": f"{boot} pid:[1]", "start": "1"}))
        assert len(ask("jobs").stdout.splitlines()) == 3
        assert sorted(entry.parent.iterdir()) == sorted([entry, container])
        before = {**said, "machine": f"{boot[::-1]} pid:[1]"}
        container.write_text(json.dumps(before))
        assert len(ask("jobs").stdout.splitlines()) == 3
        assert list(entry.parent.iterdir()) == [entry]
        launcher.kill()
        launcher.wait(TIMEOUT)
        where = f"runs/{directory_of(tmp_path).name}"
        gone = f"{where}  launcher killed: process {launcher.pid} is gone · "
        for _ in range(2):
            assert ask("jobs").stdout.startswith(gone)
            assert list(entry.parent.iterdir()) == []
        assert "runs: no job is running there" in ask("stacks", "runs").stderr
        killed = f"{where}: the launcher of this job was killed, and its agents have ended the ranks"
        assert killed in ask("stacks", where).stderr


def test_the_line_of_a_stalled_job_names_the_rank_once(ask: Ask, tmp_path: Path) -> None:
    text = "no progress for 3 s: rank 1 on localhost has not called all_reduce #5"
    failure = {"rank": 1, "host": "localhost", "error": text}
    job = tmp_path / "runs" / "x"
    job.mkdir(parents=True)
    (job / "outcome.json").write_text(json.dumps({"kind": "stalled", "first_failure": failure, "ranks": []}))
    assert f"runs/x  stalled: {text} · " in ask("jobs").stdout


def test_a_running_job_that_hangs_is_shown_as_stalled(env: dict[str, str], ask: Ask, tmp_path: Path) -> None:
    program = SLEEPS.replace('print("done"', 'import sys; sys.exit(0)\nprint("done"')
    with job(tmp_path, env, ["--no-python", "--stall-timeout", "1"], program, sys.executable) as launcher:
        until(lambda: list(tmp_path.glob("runs/*/stacks-1.txt")), "the stall to be reported")
        first, why, where, _ = ask("jobs").stdout.splitlines()
        assert first.startswith(f"{directory_of(tmp_path).name}  stalled · 1 host, 2 ranks · ")
        assert re.match(r"    no progress for \d+ s: ", why)
        assert where.strip() == str(directory_of(tmp_path))
        (tmp_path / "go").touch()
        launcher.wait(TIMEOUT)


def test_ended_jobs_are_listed_with_the_newest_first(
    env: dict[str, str], ask: Ask, cpulaunch: Run, tmp_path: Path
) -> None:
    (tmp_path / "works.py").write_text("print('ready')")
    (tmp_path / "fails.py").write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('a b')")
    cpulaunch("run", "-n", "2", "works.py", "--name", "a b", "--token", "abc", env=env)
    cpulaunch("run", "-n", "2", "fails.py", env=env)
    cpulaunch("run", "-n", "2", "--no-python", "sh", "-c", "true", env=env)
    with job(tmp_path, env, [], SLEEPS) as launcher:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(TIMEOUT)
    with job(tmp_path, env, [], SLEEPS) as launcher:
        began = {path: (path / "plan.json").stat().st_mtime_ns for path in tmp_path.glob("runs/*")}
        newest, *others = sorted(began, key=began.__getitem__, reverse=True)
        (first, where, _, *lines) = ask("jobs").stdout.splitlines()
        assert first.startswith(f"{newest.name}  running · 1 host, 2 ranks · ")
        assert where.strip() == str(newest)
        (tmp_path / "go").touch()
        launcher.wait(TIMEOUT)
    seconds = r"\d+ s"
    for line, path, state, program in zip(
        lines,
        others,
        ("interrupted", "ok", "failed: rank 1 on localhost: ValueError: a b", "ok"),
        ("program.py", f"{shutil.which('sh')} -c true", "fails.py", "works.py --name 'a b' --token …"),
        strict=True,
    ):
        whole = rf"runs/{path.name}  {state} · 1 host, 2 ranks · {seconds} · {re.escape(program)}"
        assert re.fullmatch(whole, line), line
    assert ask("jobs", others[0]).stdout == lines[0].replace("runs/", f"{tmp_path}/runs/") + "\n"


def test_jobs_are_found_in_the_configured_log_directory(
    env: dict[str, str], ask: Ask, cpulaunch: Run, tmp_path: Path
) -> None:
    """`cpulaunch run` and other commands read the directory from the same YAML file and variables."""
    (tmp_path / "works.py").write_text("print('it works')")
    (tmp_path / "cpulaunch.yaml").write_text("output:\n  log_dir: elsewhere/yaml\n")
    cpulaunch("run", "-n", "1", "works.py", env=env)
    (first,) = tmp_path.glob("elsewhere/yaml/*")
    assert ask("jobs").stdout.startswith(f"elsewhere/yaml/{first.name}  ok · ")
    assert ask("logs").stdout == "[0] it works\n"
    assert ask("logs", first.name[:20], "--rank", "0").stdout == "it works\n"
    env["CPULAUNCH_OUTPUT_LOG_DIR"] = "by-variable"
    assert "no job in by-variable/" in ask("jobs").stdout
    assert "no job in by-variable/" in ask("report").stderr
    cpulaunch("run", "-n", "1", "works.py", env=env)
    (second,) = tmp_path.glob("by-variable/*")
    assert ask("jobs").stdout.startswith(f"by-variable/{second.name}  ok · ")
    del env["CPULAUNCH_OUTPUT_LOG_DIR"]
    (tmp_path / "cpulaunch.yaml").write_text("output:\n  log_dirs: x\n")
    done = ask("logs")
    assert (done.returncode, done.stdout) == (2, "")
    assert "log_dirs" in done.stderr
    (tmp_path / "cpulaunch.yaml").unlink()
    assert ask("logs", second).stdout == "[0] it works\n"


def test_the_rate_is_computed_from_the_steps_of_all_attempts() -> None:
    attempts = [{"steps": 30, "seconds": 20.0}, {"steps": 10, "seconds": 5.0, "resumed_from": 25}]
    end = ended({"kind": "ok", "attempts": attempts, "ranks": [{"host": "a"}, {"host": "b"}], "restarts": 1})
    assert (end.steps, end.rate, end.hosts, end.ranks, end.restarts) == (35, 1.6, 2, 2, 1)
    assert ended({"attempts": [{}, 7], "ranks": 3, "first_failure": 4}).steps is None


@pytest.mark.parametrize(
    "number",
    ["Infinity", "NaN", "1e400", pytest.param("1" + "0" * 400, id="whole number"), '"many"'],
)
def test_impossible_numbers_in_an_outcome_count_as_missing(ask: Ask, tmp_path: Path, number: str) -> None:
    (job := tmp_path / "runs" / "x").mkdir(parents=True)
    attempt = f'{{"seconds": {number}, "steps": {number}, "resumed_from": {number}}}'
    (job / "outcome.json").write_text(
        f'{{"kind": "ok", "seconds": {number}, "restarts": {number}, "attempts": [{attempt}], "ranks": [{{}}]}}'
    )
    (job / "plan.json").write_text(f'{{"world_size": {number}}}')
    assert ask("jobs").stdout == "runs/x  ok · 1 host, 1 rank · 0 s\n"


def test_a_killed_launcher_on_another_host_is_reported_as_gone(
    env: dict[str, str], ask: Ask, tmp_path: Path
) -> None:
    """Only the shared directory with its files is accessible, not the other host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    contact = Contact("theirs", 7, "node7", "x", "1", 9e9, f"127.0.0.1:{port}", "", ["train.py"])
    directory = tmp_path / "runs" / "theirs"
    directory.mkdir(parents=True)
    control = directory / "control.json"
    control.write_text(json.dumps(contact._asdict()))
    entry = tmp_path / "runtime/cpulaunch/jobs/theirs.json"
    entry.parent.mkdir(parents=True, mode=0o700)
    listed = {"host": "node7", "machine": "x", "pid": 7, "start": "1", "directory": str(directory)}
    entry.write_text(json.dumps(listed))
    done = ask("stacks")
    assert (done.returncode, done.stdout) == (2, "")
    assert "`cpulaunch stacks theirs` asks the job on node7" in done.stderr
    for named in (directory, "theirs"):
        done = ask("stacks", named)
        assert (done.returncode, done.stdout) == (3, "")
        assert "the launcher of job theirs, process 7 on node7, is gone" in done.stderr
        assert f"nothing listens at 127.0.0.1:{port} any more" in done.stderr
    assert "theirs  does not answer: it was probably killed" in ask("jobs").stdout
    control.write_text(json.dumps({**contact._asdict(), "address": "@nobody"}))
    done = ask("stacks", directory)
    assert "can't be reached from here" in done.stderr
    assert "run this command there (ssh node7)" in done.stderr
    with job(tmp_path, env, [], SLEEPS) as launcher:
        assert "load_batch" in ask("stacks").stdout  # of this job, although the other job claims to be newer
        (tmp_path / "go").touch()
        launcher.wait(TIMEOUT)


def test_a_stopped_launcher_is_shown_as_stopped(env: dict[str, str], ask: Ask, tmp_path: Path) -> None:
    with job(tmp_path, env, [], SLEEPS) as launcher:
        until((directory_of(tmp_path) / CONTROL_FILE).exists, "the launcher to be found")
        launcher.send_signal(signal.SIGSTOP)
        go_on = f"`fg` or `kill -CONT {launcher.pid}`"
        try:
            assert f"its launcher is stopped: {go_on}" in ask("jobs").stdout
            asked = ask("stacks")
            assert asked.returncode == 3
            assert f"hint: {go_on}" in asked.stderr
        finally:
            launcher.send_signal(signal.SIGCONT)
        (tmp_path / "go").touch()
        launcher.wait(TIMEOUT)


def test_the_job_runs_even_if_the_list_cannot_be_written(
    env: dict[str, str], ask: Ask, tmp_path: Path
) -> None:
    """Commands find the job if they run in its directory or name it."""
    shutil.rmtree(env["XDG_RUNTIME_DIR"])
    Path(env["XDG_STATE_HOME"]).write_text("no directory")
    with job(tmp_path, env, [], SLEEPS) as launcher:
        (tmp_path / "elsewhere").mkdir()
        assert ask("stacks", cwd=tmp_path / "elsewhere").returncode == 2
        assert ask("stacks").returncode == 0
        assert ask("stacks", "runs").returncode == 0
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0


def test_jobs_are_found_from_within_their_directory(ask: Ask, tmp_path: Path) -> None:
    runs = tmp_path / "project" / "runs"
    ids = ["20261122-214433-0f3c9a7e5b1d2c48", "20261122-214501-1f3c9a7e5b1d2c48"]
    for name in ids:
        (runs / name).mkdir(parents=True)
        (runs / name / "rank-0.log").write_text(f"{name}\n")
        (runs / name / "plan.json").write_text('{"world_size": 1}')
        (runs / name / "outcome.json").write_text('{"kind": "ok", "attempts": [{"steps": 0, "seconds": 2}]}')
    (runs / ids[1] / "stacks-1.txt").touch()
    within = ask("jobs", cwd=runs).stdout
    assert all(name in within for name in ids)
    assert " steps" not in within
    assert ids[0] in ask("jobs", cwd=runs / ids[0]).stdout
    project = runs.parent
    done = ask("logs", cwd=project)
    assert (done.stdout, done.stderr) == (f"[0] {ids[1]}\n", f"cpulaunch: logs of runs/{ids[1]}\n")
    done = ask("logs", "20261122", cwd=project)
    assert f"20261122: several jobs match: {ids[0]}, {ids[1]}" in done.stderr
    for named in (ids[1][:16], f"runs/{ids[1]}"):
        done = ask("stacks", named, cwd=project)
        assert f"{named}: this job has ended" in done.stderr
        assert f"runs/{ids[1]}/stacks-1.txt has the stacks of the last stall" in done.stderr
    assert "`cpulaunch jobs runs` lists jobs that have ended" in ask("stacks", "runs", cwd=project).stderr
