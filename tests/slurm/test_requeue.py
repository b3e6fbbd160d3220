"""Time limits: a job saves, is requeued, and goes on to the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.command import REPOSITORY, clean_environment
from support.namespaces import until
from support.slurm import Queue

from slurm.conftest import CPULAUNCH

pytestmark = pytest.mark.slow

TIMEOUT = 240.0
STEPS = 150


def test_a_job_that_is_warned_saves_is_requeued_and_goes_on(queue: Queue, tmp_path: Path) -> None:
    """The signal is the one of --signal, but sent by hand, as Slurm knows no limit under a minute."""
    pytest.importorskip("sklearn")
    ours = ["--launcher", "slurm", "--skip-preflight", "--threads", "1", "--checkpoint-every", "20"]
    job = ["--nodes", "2", "--time", "10", "--requeue", *ours]
    script = [REPOSITORY / "examples" / "checkpoint.py", "--steps", STEPS]
    environ = clean_environment(LC_ALL="C.UTF-8", **queue.environment)
    argv = [*CPULAUNCH, "submit", *job, *map(str, script)]
    done = queue.run("login", argv, directory=tmp_path, env=environ)
    found = re.search(r"Slurm job (\d+): what it prints is in (\S+)", done.stderr)
    assert found, done.stderr
    number, output = found[1], tmp_path / found[2]

    def printed() -> str:
        return output.read_text() if output.exists() else ""

    try:
        until(lambda: "step 50:" in printed() or not queue.jobs(), "the first steps", TIMEOUT)
        queue.slurm("scancel", "--batch", "--signal=TERM", number)
        until(lambda: not queue.jobs(), "the job's end", TIMEOUT)
    finally:
        queue.slurm("scancel", number)
    saved = re.search(r"SIGTERM: saved step (\d+), ending with exit code 75", printed())
    assert saved, printed()
    assert f"goes on after step {saved[1]}," in printed()
    assert printed().count("step 50:") == 1
    assert printed().count(f"step {STEPS}:") == 1
    assert "weights " in printed()
