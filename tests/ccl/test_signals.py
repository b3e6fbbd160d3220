"""Signals that arrive while a thread waits for a collective."""

from __future__ import annotations

import pytest
from ranks import run_script

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("built")]

# Rank 1 joins when rank 0's handler runs.  The handler returns when rank 1 has the sum.
HANDLED = """
import os, signal, threading, torch, torch.distributed as dist
dist.init_process_group("ccl")
rank, x = dist.get_rank(), torch.ones(1_000_000)
store = dist.distributed_c10d._get_default_store()

def handle(*_):
    store.set("handler", "runs")
    store.wait(["sum"])
    print("handled")

if rank == 0:
    signal.signal(signal.SIGUSR1, handle)
    work = dist.all_reduce(x, async_op=True)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    work.wait()
else:
    store.wait(["handler"])
    dist.all_reduce(x)
    store.set("sum", "is there")
print(x[0].item())
dist.destroy_process_group()
"""


def test_a_collective_continues_while_its_waiting_thread_handles_a_signal() -> None:
    first, second = run_script(2, HANDLED)
    assert (first.returncode, first.stdout, first.stderr) == (0, "handled\n2.0\n", "")
    assert (second.returncode, second.stdout, second.stderr) == (0, "2.0\n", "")
