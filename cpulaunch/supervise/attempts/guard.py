"""Ends an mpiexec whose launcher was killed, after its agents had the time to end their programs themselves::

    python -I -S …/cpulaunch/supervise/guard.py LAUNCHER SECONDS JOB DIRECTORY

Open MPI's mpiexec would go on with ranks whose agents the launcher had not heard yet, and at a signal, it
kills agents sooner than they can end a program's children.  Standard library only.  mpiexec's process
id comes by stdin.  The guard ends with mpiexec, and removes DIRECTORY then, unless that is '': what mpiexec
leaves when it is killed itself, with ``{pid}`` for its id.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys

sys.path.append(__file__.rpartition("/cpulaunch/")[0])

from cpulaunch.supervise.attempts.sweep import sweep

PAUSE = 5.0
"""Seconds that mpiexec has after each signal."""


def main(launcher: int, patience: float, job_id: str, directory: str) -> None:
    """Wait for either to end; where that is the launcher, end the other ``patience`` seconds later."""
    mpiexec = sys.stdin.read()
    if not mpiexec:  # it was never started
        return
    try:
        its = os.pidfd_open(int(mpiexec))
    except OSError:  # it has ended, or the kernel is older than 5.3
        return
    ours = None  # the launcher has ended
    if os.getppid() == launcher:
        with contextlib.suppress(ProcessLookupError):
            ours = os.pidfd_open(launcher)
    if ours is not None:
        select.select([ours, its], [], [])
    if not _has_ended(its, 0):
        _end(its, patience)
        sweep(job_id)
    if directory:
        shutil.rmtree(directory.replace("{pid}", mpiexec), ignore_errors=True)


def _end(its: int, patience: float) -> None:
    for number, seconds in ((0, patience), (signal.SIGTERM, PAUSE), (signal.SIGKILL, PAUSE)):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            signal.pidfd_send_signal(its, number)
        if _has_ended(its, seconds):
            break


def _has_ended(pidfd: int, seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
