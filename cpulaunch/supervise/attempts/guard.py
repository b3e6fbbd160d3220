"""End an mpiexec whose launcher was killed, after giving its agents time to end their programs::

    python -I -S …/cpulaunch/supervise/attempts/guard.py LAUNCHER SECONDS JOB DIRECTORY

Without its launcher, Open MPI's mpiexec goes on with ranks whose agents have not connected yet.  When it gets
a signal, it kills agents before they can end their programs' children.  So the guard first waits SECONDS.

The guard reads mpiexec's process id from stdin, and ends with mpiexec.  It then removes DIRECTORY, which
mpiexec leaves behind when it is killed itself; ``{pid}`` in DIRECTORY stands for the process id.  If
DIRECTORY is '', nothing is removed.  Uses the standard library only.
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
"""Seconds to wait for mpiexec after each signal."""


def main(launcher: int, patience: float, job_id: str, directory: str) -> None:
    """Wait until mpiexec or ``launcher`` ends; after the launcher, end mpiexec ``patience`` seconds later."""
    mpiexec = sys.stdin.read()
    if not mpiexec:  # mpiexec was never started
        return
    try:
        mpiexec_fd = os.pidfd_open(int(mpiexec))
    except OSError:  # mpiexec has ended, or the kernel is older than 5.3
        return
    if os.getppid() == launcher:
        with contextlib.suppress(ProcessLookupError):  # the launcher has just ended
            select.select([os.pidfd_open(launcher), mpiexec_fd], [], [])
    if not _has_ended(mpiexec_fd, 0):
        _end(mpiexec_fd, patience)
        sweep(job_id)
    if directory:
        shutil.rmtree(directory.replace("{pid}", mpiexec), ignore_errors=True)


def _end(pidfd: int, patience: float) -> None:
    for number, seconds in ((0, patience), (signal.SIGTERM, PAUSE), (signal.SIGKILL, PAUSE)):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            signal.pidfd_send_signal(pidfd, number)
        if _has_ended(pidfd, seconds):
            break


def _has_ended(pidfd: int, seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
