"""Jobs with two real attempts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.command import TIMEOUT, bounded, clean_environment
from support.jobs import outcome

# cpulaunch, changed to record each plan after the first.
LAUNCH = """
import os
from cpulaunch.cli.run import replan
from cpulaunch.cli.main import entry
from cpulaunch.errors import HostError

plan = replan.Replanner.__call__

def plan_again(self, without):
    open("planned", "a").write("again\\n")
    if os.path.exists("refuse"):
        raise HostError("no host is free", hint="ask later")
    return plan(self, without)

replan.Replanner.__call__ = plan_again
entry()
"""

# cpulaunch, changed to have a bug in its handling of agents' messages, which appears once a rank runs.
BROKEN = """
from cpulaunch import messages
from cpulaunch.cli.main import entry
from cpulaunch.supervise.job import agents

handle_message = agents.handle_message

def mistaken(state, rank, message):
    if isinstance(message, messages.Output):
        raise AssertionError("a mistake of ours")
    handle_message(state, rank, message)

agents.handle_message = mistaken
entry()
"""

# Rank 1 fails in the first attempt while rank 0 waits, with a child in its own session.
PROGRAM = """
import json, os, pathlib, subprocess, sys, time
rank, attempt = os.environ["RANK"], os.environ["CPULAUNCH_RESTART_COUNT"]
agent = dict(each.split("=", 1) for each in open(f"/proc/{os.getppid()}/environ").read().split("\\0") if each)
names = ("CPULAUNCH_JOB_ID", "CPULAUNCH_TOKEN", "CPULAUNCH_CONTROL", "MASTER_PORT")
pids = [os.getpid(), os.getppid()]
before = [pid for path in pathlib.Path().glob("0-*.json") for pid in json.loads(path.read_text())["pids"]]
if attempt == "0":
    pids.append(subprocess.Popen(["sleep", "300"], start_new_session=True).pid)
record = {name: agent[name] for name in names}
record |= {"pids": pids, "left": [pid for pid in before if os.path.exists(f"/proc/{pid}")]}
file = pathlib.Path(f"{attempt}-{rank}.json")
file.with_suffix(".new").write_text(json.dumps(record))
file.with_suffix(".new").rename(file)
print("ready", flush=True)
print(f"attempt {attempt}", file=sys.stderr)
while not pathlib.Path(f"{attempt}-0.json").exists() or (attempt, rank) == ("0", "0"):
    time.sleep(0.02)
if attempt == "0" and not pathlib.Path("wait").exists():
    raise ValueError("no such luck")
while pathlib.Path("wait").exists():
    time.sleep(0.02)
"""


def start(directory: Path, env: dict[str, str], launch: str = LAUNCH) -> subprocess.Popen[str]:
    (directory / "launch.py").write_text(launch)
    (directory / "train.py").write_text(PROGRAM)
    options = [
        "run",
        "-n",
        "2",
        "--tee",
        "all",
        "--grace-period",
        "2",
        "--max-restarts",
        "1",
        "--restart-on",
        "error",
        "train.py",
    ]
    return subprocess.Popen(
        [sys.executable, "launch.py", *options],
        cwd=directory,
        env=clean_environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_second_attempt_shares_only_the_job_with_the_first(marked: dict[str, str], tmp_path: Path) -> None:
    with bounded(start(tmp_path, marked)) as launcher:
        _, stderr = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 0, stderr
    assert (tmp_path / "planned").read_text().split() == ["again"]
    result = outcome(tmp_path)
    assert (result["kind"], result["restarts"], result["first_failure"]) == ("ok", 1, None)
    assert [rank["status"] for rank in result["ranks"]] == ["exit 0", "exit 0"]

    def attempt(number: int) -> list[dict[str, Any]]:
        return [json.loads((tmp_path / f"{number}-{rank}.json").read_text()) for rank in (0, 1)]

    first, second = attempt(0), attempt(1)
    for name in ("CPULAUNCH_TOKEN", "CPULAUNCH_CONTROL", "MASTER_PORT"):
        assert len({record[name] for record in first}) == 1
        assert first[0][name] != second[0][name]
    assert len({record["CPULAUNCH_JOB_ID"] for record in (*first, *second)}) == 1
    assert [record["left"] for record in second] == [[], []]
    # After rank 1's failure, the terminal shows no more of its output from the first attempt.
    assert "[1] attempt 1" in stderr
    assert "rank 1 on localhost: ValueError: no such luck, at train.py:" in stderr
    (log,) = tmp_path.glob("runs/*/rank-1.log")
    assert log.read_text().count("ready") == 2


def test_after_ctrl_c_nothing_is_planned(marked: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with bounded(start(tmp_path, marked)) as launcher:
        assert launcher.stdout
        assert {launcher.stdout.readline(), launcher.stdout.readline()} == {"[0] ready\n", "[1] ready\n"}
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 130
    assert not (tmp_path / "planned").exists()
    assert outcome(tmp_path)["restarts"] == 0


def test_without_a_second_attempt_the_first_one_determines_the_outcome(
    marked: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "refuse").touch()
    with bounded(start(tmp_path, marked)) as launcher:
        _, stderr = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 1
    assert "the job can't be started again: no host is free" in stderr
    result = outcome(tmp_path)
    assert (result["kind"], result["restarts"]) == ("error", 0)
    assert "no such luck" in result["first_failure"]["error"]


def test_a_bug_of_cpulaunch_ends_the_job_and_is_shown(marked: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with bounded(start(tmp_path, marked, BROKEN)) as launcher:
        _, stderr = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 1
    assert "AssertionError: a mistake of ours" in stderr
    pids = [pid for path in tmp_path.glob("0-*.json") for pid in json.loads(path.read_text())["pids"]]
    assert pids
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
