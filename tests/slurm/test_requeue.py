"""Time limits: a job saves, is requeued, and continues to its end.

`cpulaunch submit --requeue` writes the same lines (`tests/cli/submit/test_submit.py`).
"""

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
STEPS = 2000
EXAMPLE = REPOSITORY / "examples" / "checkpoint.py"


def test_a_warned_job_saves_is_requeued_and_continues(queue: Queue, tmp_path: Path) -> None:
    """The script is from docs/restarts.md.  The test sends the signal, as limits are at least a minute."""
    pytest.importorskip("sklearn")
    page = (REPOSITORY / "docs" / "restarts.md").read_text()
    (script,) = re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH .*?)^```", page, re.M | re.S)
    ours = f"{' '.join(CPULAUNCH)} run --launcher slurm --skip-preflight --threads 1"
    for theirs, instead in (
        ("cpulaunch run", ours), ("--checkpoint-every 10m", "--checkpoint-every 20"),
        ("train.py", f"{EXAMPLE} --steps {STEPS}"),
    ):  # fmt: skip
        assert theirs in script
        script = script.replace(theirs, instead)
    (tmp_path / "job.sh").write_text(script)
    argv = ["sbatch", "--parsable", "--nodes=2", "--time=20", "--output=out", "job.sh"]
    environ = clean_environment(LC_ALL="C.UTF-8", **queue.environment)
    job = queue.run("login", argv, directory=tmp_path, env=environ).stdout.strip()
    output = tmp_path / "out"

    def printed() -> str:
        return output.read_text() if output.exists() else ""

    try:
        until(lambda: "step 50:" in printed() or not queue.jobs(), "the first steps", TIMEOUT)
        queue.slurm("scancel", "--batch", "--signal=USR1", job)
        until(lambda: not queue.jobs(), "the job's end", TIMEOUT)
    finally:
        queue.slurm("scancel", job)
    saved = re.search(r"SIGUSR1: saved step (\d+), ending with exit code 75", printed())
    assert saved, printed()
    assert f"resuming after step {saved[1]} " in printed()
    assert printed().count("step 50:") == 1
    assert printed().count(f"step {STEPS}:") == 1
    assert "weights " in printed()
