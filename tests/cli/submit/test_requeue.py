"""Which jobs the batch script in docs/restarts.md requeues."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY, TIMEOUT, bounded, clean_environment
from support.namespaces import until

from cpulaunch.cli.run.command import MAX_REQUEUES

# The script saves like Checkpoint, but without PyTorch.  It ends by itself when the file "go" exists.
SAVES = """
import os, pathlib, signal, sys, time
from cpulaunch.runtime.reports import saved
def save(*_):
    saved(7, leaving=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
pathlib.Path("ready").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.02)
sys.exit(3)
"""

# The script has made no step and has nothing to save.
BEGINS = """
import pathlib, time
pathlib.Path("ready").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("script", "signaled", "before", "code"),
    [
        (SAVES, True, 30, 75),
        (SAVES, False, 0, 3),
        (BEGINS, True, MAX_REQUEUES - 1, 75),
        (BEGINS, True, MAX_REQUEUES, 128 + signal.SIGUSR1),
    ],
)
def test_a_job_is_requeued_if_it_has_saved_or_made_no_step(
    tmp_path: Path, script: str, signaled: bool, before: int, code: int
) -> None:
    """``before`` is the number of earlier requeues."""
    text = (REPOSITORY / "docs" / "restarts.md").read_text()
    (batch,) = re.findall(r"```bash\n(.*?)```", text, re.S)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "job.sh").write_text(batch)
    (programs := tmp_path / "bin").mkdir()
    for name, does in (
        ("cpulaunch", f'exec {sys.executable} -m cpulaunch "$@"'),
        ("scontrol", 'echo "$@" JobState=RUNNING'),
    ):
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    env = clean_environment(SLURM_JOB_ID="4711", SLURM_RESTART_COUNT=str(before))
    env["PATH"] = f"{programs}:{env['PATH']}"
    pipe = subprocess.PIPE
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True)
    with bounded(job, TIMEOUT):
        until((tmp_path / "ready").exists, "the job to run")
        if signaled:
            job.send_signal(signal.SIGUSR1)
        else:
            (tmp_path / "go").touch()
        stdout, stderr = job.communicate()
    assert job.returncode == code, stderr
    assert ("requeue 4711" in stdout) == (code == 75)
    assert ("it had made no step, so nothing is lost" in stderr) == (script == BEGINS and code == 75)
    why = f"Slurm has requeued this job {MAX_REQUEUES} times, and it has made no step of torch.optim"
    assert (why in stderr) == (script == BEGINS and code != 75)
