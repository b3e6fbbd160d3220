"""Find out whether the kernel killed a program for lack of memory."""

from __future__ import annotations

import os
from signal import SIGKILL

from cpulaunch.cause import Cause, Kind


def oom_kills() -> int | None:
    """The number of processes that this host's kernel has killed for lack of memory; None if unknown.

    It includes kills at a cgroup's limit.  Source: ``oom_kill`` of /proc/vmstat, since Linux 4.13.
    """
    try:
        with open("/proc/vmstat") as f:
            for line in f:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def why_killed(pid: int, kills_before: int | None) -> Cause:
    """The cause of the SIGKILL that ended the child ``pid``, with the child's peak memory in GiB.

    ``kills_before`` is the value of `oom_kills` from before the child's start.
    """
    import resource

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (1 << 20)  # KiB (getrusage(2))
    killed = Cause(Kind.KILLED, signal=int(SIGKILL), memory=round(peak, 3))
    if record := _kernels_record(pid):
        return killed._replace(kind=Kind.OUT_OF_MEMORY, detail=record)
    kills = oom_kills()
    if kills is None or kills_before is None:
        return killed
    return killed._replace(kind=Kind.OUT_OF_MEMORY if kills > kills_before else Kind.KILLED_BY_OTHERS)


def _kernels_record(pid: int) -> str | None:
    """The newest line of the kernel's log about the kill of ``pid``.  Often only root may read the log."""
    mark = f"Killed process {pid} (".encode()
    found = None
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        while True:
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:
                continue  # the kernel has overwritten this record; read the next one
            if mark in record:
                found = record.partition(b";")[2].partition(b"\n")[0].decode(errors="replace")
    except OSError:
        return found  # BlockingIOError: no more records
    finally:
        os.close(log)
