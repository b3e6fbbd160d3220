"""Many ranks on a small machine start, connect, and end, with bounded time and descriptors."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY, TIMEOUT, Run, bounded, clean_environment, mpi_options
from support.jobs import box, outcome, run_changed
from support.marks import repeat, slow

from cpulaunch.supervise.attempts.start import OWN_FILES

MOST_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

LONG = 240.0
"""Seconds for a thousand agents on two busy cores."""


def limited(files: str, *arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run cpulaunch in a shell that calls ``ulimit`` with ``files``."""
    return subprocess.run(
        ["bash", "-c", f'ulimit {files} && exec "$@"', "bash", sys.executable, "-m", "cpulaunch", *arguments],
        cwd=directory,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.mark.slow
@pytest.mark.skipif(MOST_FILES < 8192 + OWN_FILES, reason=f"only {MOST_FILES} files may be open at once")
@pytest.mark.parametrize("ranks", [1024, repeat(8192)])
def test_many_agents_cost_little_and_a_failing_rank_is_named(ranks: int, tmp_path: Path) -> None:
    """scale.py checks the reports and logs, and the test checks the launcher's memory."""
    done = subprocess.run(
        [
            sys.executable,
            REPOSITORY / "scripts/bench/scale.py",
            *f"--ranks {ranks} --seconds 1 --local".split(),
        ],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(REPOSITORY)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    titles, values = (re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()[:2])
    assert float(dict(zip(titles, values, strict=True))["memory, MB"]) < 300


@pytest.mark.repeats
def test_a_failing_rank_of_many_local_ones_is_named_and_all_end(
    cpulaunch: Run, marked: dict[str, str], tmp_path: Path
) -> None:
    program = ("--no-python", "sh", "-c", 'test "$RANK" != 700 || exit 5; exec sleep 300')
    done = cpulaunch("run", "-n", 1024, "--oversubscribe", *program, env=marked, timeout=LONG)
    assert done.returncode == 5
    assert box(done.stderr)[0] == "rank 700 on localhost failed first"
    statuses = [rank["status"] for rank in outcome(tmp_path)["ranks"]]
    assert statuses[700] == "exit 5"
    assert set(statuses[:700] + statuses[701:]) <= {"ended by launcher", "not started"}


def test_agents_are_started_a_few_at_a_time_and_served_meanwhile(
    cpulaunch: Run, marked: dict[str, str], tmp_path: Path
) -> None:
    """A rank that fails at once ends the job before a hundred others have been started."""
    program = ("--no-python", "sh", "-c", 'test "$RANK" != 0 || exit 5; exec sleep 300')
    done = cpulaunch("run", "-n", 400, "--oversubscribe", *program, env=marked)
    assert done.returncode == 5
    statuses = [rank["status"] for rank in outcome(tmp_path)["ranks"]]
    assert statuses[0] == "exit 5"
    assert set(statuses[1:]) == {"ended by launcher", "not started"}
    assert len(list(tmp_path.glob("runs/*/rank-*.log"))) < 400
    assert statuses.count("not started") > 200


def test_ctrl_c_while_agents_are_started_ends_them_all(marked: dict[str, str], tmp_path: Path) -> None:
    with bounded(
        subprocess.Popen(
            [sys.executable, "-m", "cpulaunch", "run", "-n", "400", "--oversubscribe", "--tee", "0",
             "--no-python", "sh", "-c", "echo ready; exec sleep 300"],
            cwd=tmp_path, env=clean_environment(**marked), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True,
        )
    ) as launcher:  # fmt: skip
        assert launcher.stdout
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(TIMEOUT) == 130
    assert "not started" in {rank["status"] for rank in outcome(tmp_path)["ranks"]}


def test_programs_get_the_limit_of_open_files_that_the_launcher_was_started_with(tmp_path: Path) -> None:
    """The launcher and the agents raise their own limit, as a hundred agents need more than 99 files."""
    program = ("--no-python", "sh", "-c", "ulimit -Sn")
    done = limited("-Sn 99", "run", "-n", "100", "--oversubscribe", *program, directory=tmp_path)
    assert (done.returncode, set(done.stdout.split()[1::2])) == (0, {"99"}), done.stderr


@pytest.mark.parametrize("mpi", [repeat("intel"), repeat("mpich"), slow("openmpi")])
def test_programs_under_mpiexec_get_their_limit_too(mpi: str, tmp_path: Path) -> None:
    program = ("--no-python", "sh", "-c", "ulimit -Sn")
    done = limited("-Sn 99", "run", *mpi_options(mpi), "-n", "2", *program, directory=tmp_path)
    assert (done.returncode, done.stdout.split()[1::2]) == (0, ["99", "99"]), done.stderr


def test_few_ranks_on_this_machine_need_few_files(tmp_path: Path) -> None:
    done = limited("-n 256", "run", "-n", "2", "--no-python", "true", directory=tmp_path)
    assert done.returncode == 0, done.stderr


def test_with_too_few_open_files_nothing_is_started(tmp_path: Path) -> None:
    program = ("--no-python", "touch", str(tmp_path / "started"))
    done = limited("-n 180", "run", "-n", "100", "--oversubscribe", *program, directory=tmp_path)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "cpulaunch: error: 100 ranks need 244 open files in the launcher, but the limit is 180",
        "cpulaunch: hint: raise it (ulimit -Hn 244, as root), or start fewer ranks",
    ]
    assert not (tmp_path / "started").exists()


# cpulaunch, changed so that the last agent's interpreter is missing, and only this agent can't be started.
ONE_IS_MISSING = """
from dataclasses import replace
from cpulaunch.cli.main import entry
from cpulaunch.launchers.local import Local

planned = Local.commands

def commands(self, plan, installation):
    *others, last = planned(self, plan, installation)
    return *others, replace(last, argv=("/nowhere/python", *last.argv[1:]))

Local.commands = commands
entry()
"""


def test_an_agent_that_cannot_be_started_is_named(marked: dict[str, str], tmp_path: Path) -> None:
    program = ("--no-python", "sleep", "300")
    arguments = ("run", "-n", "100", "--oversubscribe", *program)
    done = run_changed(ONE_IS_MISSING, *arguments, directory=tmp_path, env=marked)
    assert done.returncode == 3
    title, lines = box(done.stderr)
    assert title == "rank 99 on localhost was not started"
    assert lines[0] == "/nowhere/python can't be run: No such file or directory"
    statuses = [rank["status"] for rank in outcome(tmp_path)["ranks"]]
    assert statuses == ["ended by launcher"] * 99 + ["not started"]
