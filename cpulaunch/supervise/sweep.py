"""End what a job may have left on this host.  A process belongs to a job if its environment says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def sweep(job_id: str) -> list[int]:
    """Kill all processes of the job ``job_id`` on this host; returns their pids."""
    mark = f"CPULAUNCH_JOB_ID={job_id}".encode()
    killed: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(int(entry.name))
        except OSError:
            pass  # not ours to read, or gone
    return killed
