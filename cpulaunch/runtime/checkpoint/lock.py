"""A lock file, so that only one job at a time writes checkpoints to a directory."""

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
"""Seconds to wait for another job.  If a launcher is killed, its ranks still save before they end."""

PAUSE = 0.1
"""Seconds between two attempts."""

_claimed: dict[Path, int] = {}
"""Directories that this process has locked → descriptors, which hold the locks until the process ends."""


def claim(root: Path) -> str:
    """Lock ``root`` until this process ends.  Returns the owner if another job has locked it, else "".

    Always succeeds if the file system doesn't support locks.
    """
    if root in _claimed:
        return ""
    try:
        fd = os.open(root / FILE, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError:  # the directory is read-only, so saving will fail
        return ""
    end = time.monotonic() + PATIENCE
    logged = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = os.pread(fd, 1 << 10, 0).decode(errors="replace").strip() or "another job"
            if not logged:
                logged = True
                log_once(f"{root} is in use by {owner}: waiting for its end, for {PATIENCE:.0f} s at most")
            if time.monotonic() > end:
                os.close(fd)
                return owner
            time.sleep(PAUSE)
        except OSError:
            break
    _claimed[root] = fd
    with suppress(OSError):  # if the disk is full, the lock holds without the owner's name
        os.truncate(fd, 0)
        os.pwrite(fd, _owner().encode(), 0)
    return ""


def _owner() -> str:
    job = os.environ.get(variables.JOB_ID)
    return (f"job {job}, " if job else "") + f"process {os.getpid()} on {socket.gethostname()}"
