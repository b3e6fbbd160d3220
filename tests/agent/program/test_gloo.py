"""Programs that use gloo: their end, forked children, and connections."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Run

pytestmark = pytest.mark.slow

# The gloo threads run only when no other thread wants the core.  Without cpulaunch, nearly every run aborts.
LATE = """
import contextlib, os
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(8))
for thread in Path("/proc/self/task").iterdir():
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has ended since
        if (thread / "comm").read_text().startswith("pt_gloo"):
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
            print("late")
dist.all_reduce(torch.ones(8))
"""


def test_late_gloo_threads_do_not_abort_the_program(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    for _ in range(2):
        done = cpulaunch("run", "-n", "2", "--backend", "gloo", "--tee", "all", "late.py")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("late") >= 2


FORKED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(8))
if (child := os.fork()) == 0:
    sys.exit(4)
print("its child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
dist.all_reduce(torch.ones(8))
"""


def test_a_forked_child_of_a_program_with_gloo_ends(cpulaunch: Run, tmp_path: Path) -> None:
    """Without cpulaunch, gloo's destructor would wait in the child for threads that only the parent has."""
    (tmp_path / "forked.py").write_text(FORKED)
    done = cpulaunch("run", "-n", "2", "--backend", "gloo", "--tee", "all", "forked.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("its child: 4") == 2


CONNECTIONS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
if dist.get_rank() == 1:  # rank 0 has the store, to which all connect
    print(sum(os.path.islink(link) and os.readlink(link).startswith("socket") for link in links))
dist.barrier()
"""


def test_lazily_initialized_gloo_connects_only_ranks_that_communicate(cpulaunch: Run, tmp_path: Path) -> None:
    """In large jobs, connecting every rank to every other rank would need too many connections."""
    (tmp_path / "connections.py").write_text(CONNECTIONS)
    lazily = ("--env", "TORCH_GLOO_LAZY_INIT=1")
    done = cpulaunch(
        "run", "-n", "4", "--oversubscribe", *lazily, "--backend", "gloo", "--tee", "all", "connections.py"
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.rpartition(" ")[2]) < 4
