"""A queue that an installed package provides.  The package is the example for PBS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY, TIMEOUT, clean_environment
from support.packages import install

from cpulaunch.plugins import QUEUES

PBS = (REPOSITORY / "examples/queues/cpulaunch_queue_pbs.py").read_text()

# Runs the job at once, like an empty queue.
QSUB = """\
#!/bin/sh
cat >"$SPOOL/job.sh"
grep -q '^#PBS -q closed' "$SPOOL/job.sh" && { echo 'Queue is not enabled' >&2; exit 1; }
PBS_O_WORKDIR="$PWD" sh "$SPOOL/job.sh" >"$SPOOL/out" 2>&1
echo $? >"$SPOOL/code"
echo 7.server
"""
QSTAT = """\
#!/bin/sh
echo "    job_state = F"
echo "    Exit_status = $(cat "$SPOOL/code")"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with the package and fake programs of PBS.  The directory ``spool`` has the jobs."""
    (site := tmp_path / "site").mkdir()
    found = install(site, "theirs", PBS, {QUEUES: "pbs = theirs:QUEUE"})
    (programs := tmp_path / "bin").mkdir()
    for name, text in (("qsub", QSUB), ("qstat", QSTAT)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (spool := tmp_path / "spool").mkdir()
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint('rank', os.environ['RANK'], sys.argv)\nsys.exit(5)\n"
    )
    return clean_environment(PATH=f"{programs}:{os.environ['PATH']}", SPOOL=str(spool), **found)


def submit(environment: dict[str, str], directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "cpulaunch", "submit", *words]
    return subprocess.run(
        argv, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )


def test_a_job_is_submitted_and_followed(environment: dict[str, str], tmp_path: Path) -> None:
    words = ("--to", "pbs", "-q", "batch", "-l", "select=1:mpiprocs=1", "-h", "--follow", "--skip-preflight")
    done = submit(environment, tmp_path, *words, "train.py", "-q", "x")
    assert done.returncode == 5, done.stderr
    assert done.stderr.splitlines() == [
        "cpulaunch: PBS job 7.server: `qstat 7.server` shows its state, and `qdel 7.server` ends it",
        "cpulaunch: PBS job 7.server is over",
    ]
    assert "rank 0 ['train.py', '-q', 'x']" in (tmp_path / "spool" / "out").read_text()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--to pbs -q closed train.py", 3, "qsub: Queue is not enabled"),
        ("--to pbs --time 3 train.py", 2, "--time is for --to slurm, and this job is for pbs"),
        ("--to pbs --resuorces=1 train.py", 2, "unknown option --resuorces"),
        ("--to pbs -l select=4:mpiprocs=2 -n 3 train.py", 2, "3 ranks, but qsub's options request 8 tasks"),
        ("--to pbs -l select=4 --machine_rank 0 train.py", 2, "in a queue's job"),
        ("--to pbs --image i train.py", 2, "--image is for --to kubernetes, and this job is for pbs"),
        ("-l select=4 train.py", 2, "-l is for --to pbs, and this job is for slurm"),
        ("--to psb train.py", 2, "--to psb: no such queue"),
    ],
)
def test_errors_are_reported(
    words: str, code: int, says: str, environment: dict[str, str], tmp_path: Path
) -> None:
    done = submit(environment, tmp_path, *words.split())
    assert done.returncode == code, done.stderr
    assert says in done.stderr


def test_an_entry_point_that_is_not_a_queue_is_an_error(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "site" / "theirs.py").write_text("QUEUE = 3\n")
    done = submit(environment, tmp_path, "--to", "pbs", "train.py")
    assert done.returncode == 2
    assert "'pbs' of cpulaunch.queues is not a Queue, but of type int" in done.stderr
    assert submit(environment, tmp_path, "--dry-run", "train.py").returncode == 0


def test_help_shows_the_options_of_the_queue(environment: dict[str, str], tmp_path: Path) -> None:
    done = submit(environment, tmp_path, "--to", "pbs", "--help")
    group = done.stdout.partition("PBS (--to pbs):")[2].partition("\n\n")[0]
    assert "-q QUEUE" in group
