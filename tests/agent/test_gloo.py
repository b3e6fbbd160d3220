"""A program that ends right after a collective of gloo's ends well."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Run

pytestmark = pytest.mark.slow

# Its gloo threads run when nobody else wants the core: without us nearly every run aborts.
LATE = """
import os
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(8))
for thread in Path("/proc/self/task").iterdir():
    if (thread / "comm").read_text().startswith("pt_gloo"):
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
        print("late")
dist.all_reduce(torch.ones(8))
"""


def test_threads_that_come_late_do_not_abort_it(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    for _ in range(4):
        done = cpulaunch("run", "-n", "2", "--backend", "gloo", "--tee", "all", "late.py")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("late") >= 2
