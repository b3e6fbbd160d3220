"""Prevent aborts of gloo when Python ends.

After a collective, gloo's thread takes the GIL to release the tensors, when the program may already have the
result.  If Python is shutting down, it stops this thread within a C++ destructor, and the process aborts
("terminate called without an active exception", torch 2.13).  This often happens if the program has only one
core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time

THREADS = "(pt_gloo_"
TIMEOUT = 1.0  # seconds
INTERVAL = 0.001


def let_gloo_finish() -> None:
    """Wait until no thread of gloo runs: usually 1 or 2 ms, at most TIMEOUT."""
    end, idle = time.monotonic() + TIMEOUT, 0
    while idle < 2 and time.monotonic() < end:
        time.sleep(INTERVAL)  # also releases the GIL
        idle = 0 if _gloo_runs() else idle + 1


def keep_groups() -> None:
    """Prevent a forked child from destroying its copies of the process groups.

    The destructors would wait for threads that exist only in the parent (torch 2.13).
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
