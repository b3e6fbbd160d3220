"""Slurm's description of a job, and the job's exit code from it.  `tests/slurm` follows real jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpulaunch.queues.slurm.follow import job_info

SHOWN = """\
JobId=7 JobName=train
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   JobState={state} Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode={code} DerivedExitCode=0:0
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=node[0-3]
   StdErr=/home/me/my runs/slurm-7.out
   StdOut=/home/me/my runs/slurm-7.out
"""


def test_a_job_is_read() -> None:
    info = job_info(SHOWN.format(state="RUNNING", code="0:0"))
    assert (info.state, info.nodes, info.requeued) == ("RUNNING", "node[0-3]", 2)
    assert info.output == Path("/home/me/my runs/slurm-7.out")


@pytest.mark.parametrize(
    ("state", "code", "exit_code"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "3:0", 3),
        ("FAILED", "0:9", 137),
        ("CANCELLED", "0:0", 143),
        ("TIMEOUT", "0:0", 143),
        ("TIMEOUT", "75:0", 75),
        ("NODE_FAIL", "0:0", 4),
        ("OUT_OF_MEMORY", "0:125", 137),
        ("BOOT_FAIL", "0:0", 1),
    ],
)
def test_a_jobs_exit_code(state: str, code: str, exit_code: int) -> None:
    assert job_info(SHOWN.format(state=state, code=code)).exit_code == exit_code
