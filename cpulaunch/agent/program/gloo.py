"""What gloo's threads need before Python ends, and those that have none.

The thread that ran a collective lets go of its tensors after the program has the result, and takes Python's
lock for it.  Once Python has begun to end, it is stopped there, in a C++ destructor, and the process aborts
("terminate called without an active exception", torch 2.13).  A thread that shares its only core with the
program often comes so late.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

THREADS = "(pt_gloo_"
LONGEST = 1.0  # seconds
ROUND = 0.001


def let_gloo_finish() -> None:
    """Wait until its threads have nothing to do, or wait for a peer: a millisecond or two."""
    end, idle = time.monotonic() + LONGEST, 0
    while idle < 2 and time.monotonic() < end:
        time.sleep(ROUND)  # lets go of Python's lock, too
        idle = 0 if _gloo_runs() else idle + 1


def keep_groups() -> None:
    """In a process that the program has forked: have Python not destroy the groups that it has copies of.

    They would wait for threads that only the program has (torch 2.13).
    """
    world = getattr(sys.modules["torch.distributed"], "distributed_c10d", None)
    for group in list(getattr(getattr(world, "_world", None), "pg_map", ())):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _gloo_runs() -> bool:
    tasks = f"/proc/{os.getpid()}/task"
    return any(_runs(f"{tasks}/{thread}/stat") for thread in os.listdir(tasks))


def _runs(stat: str) -> bool:
    try:
        with open(stat) as f:
            _, _, rest = f.read().partition(THREADS)
    except OSError:
        return False  # it has ended
    return rest.partition(") ")[2].startswith("R")
