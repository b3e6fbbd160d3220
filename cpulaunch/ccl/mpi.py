"""Leaving Intel MPI, where oneCCL uses it as its transport: oneCCL itself doesn't when the process ends, and
mpiexec takes a process that ends without for a crash, and kills the others."""

from __future__ import annotations

import ctypes
import os
import threading

PATIENCE = 10.0
"""Seconds that the other ranks have to come to their end, too, when this one has failed."""


def leave_mpi(*, has_failed: bool) -> None:
    """Finalize the MPI of this process, if oneCCL has entered one, together with the other ranks.

    They may come much later: they save, say.
    """
    library = os.environ.get("CCL_MPI_LIBRARY_PATH")
    if os.environ.get("CCL_ATL_TRANSPORT") != "mpi" or not library:
        return
    mpi = ctypes.CDLL(library)
    entered, left = ctypes.c_int(), ctypes.c_int()
    mpi.MPI_Initialized(ctypes.byref(entered))
    mpi.MPI_Finalized(ctypes.byref(left))
    if entered and not left:
        thread = threading.Thread(target=mpi.MPI_Finalize, daemon=True)
        thread.start()
        thread.join(PATIENCE if has_failed else None)
