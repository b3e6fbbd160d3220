"""A lock by which one job at a time writes checkpoints into a directory."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from cpulaunch import variables
from cpulaunch.runtime.log import log_once

FILE = ".lock"

PATIENCE = 60.0
"""Seconds that a job waits for another one: ranks whose launcher was killed still save before they end."""

PAUSE = 0.1
"""Seconds between two attempts."""

_claimed: dict[Path, int] = {}
"""Directories locked by this process → descriptors of the locks.  The kernel releases them when the process
ends."""


def claim(root: Path) -> str:
    """Lock ``root`` until this process ends.  Returns the owner if it is locked already, else "".

    If the file system has no locks, every job succeeds.
    """
    if root in _claimed:
        return ""
    try:
        fd = os.open(root / FILE, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError:  # read-only: nothing can be written there anyway
        return ""
    end = time.monotonic() + PATIENCE
    told = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = os.pread(fd, 1 << 10, 0).decode(errors="replace").strip() or "another job"
            if not told:
                told = True
                log_once(f"{root} is in use by {owner}: waiting for its end, for {PATIENCE:.0f} s at most")
            if time.monotonic() > end:
                os.close(fd)
                return owner
            time.sleep(PAUSE)
        except OSError:
            break
    _claimed[root] = fd
    with suppress(OSError):  # on a full disk, only the owner's name is lost
        os.truncate(fd, 0)
        os.pwrite(fd, _ourselves().encode(), 0)
    return ""


def _ourselves() -> str:
    job = os.environ.get(variables.JOB_ID)
    return (f"job {job}, " if job else "") + f"process {os.getpid()} on {socket.gethostname()}"
