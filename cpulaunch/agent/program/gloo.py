"""Prevent aborts of gloo when Python ends.

A thread of gloo that ran a collective releases its tensors after the program has got the result, and takes
Python's lock (GIL) to do so.  If Python is already shutting down, the thread is stopped there, in a C++
destructor, and the process aborts ("terminate called without an active exception", torch 2.13).  This often
happens to a thread that shares its only core with the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time

THREADS = "(pt_gloo_"
LONGEST = 1.0  # seconds
ROUND = 0.001


def let_gloo_finish() -> None:
    """Wait until gloo's threads are idle or wait for a peer: usually 1 or 2 ms, and at most LONGEST."""
    end, idle = time.monotonic() + LONGEST, 0
    while idle < 2 and time.monotonic() < end:
        time.sleep(ROUND)  # also releases the GIL
        idle = 0 if _gloo_runs() else idle + 1


def keep_groups() -> None:
    """In a forked child, keep Python from destroying its copies of the process groups.

    Their destructors would wait for threads that exist only in the parent (torch 2.13).
    """
    world = getattr(sys.modules["torch.distributed"], "distributed_c10d", None)
    for group in list(getattr(getattr(world, "_world", None), "pg_map", ())):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _gloo_runs() -> bool:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat") as f:
            _, _, rest = f.read().partition(THREADS)
            if rest.partition(") ")[2].startswith("R"):
                return True
    return False
