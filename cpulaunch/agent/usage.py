"""What a rank's process uses: memory, CPU time, and what has held it back.  All of it is asked of the kernel.

Sources: proc(5); Documentation/filesystems/proc.rst of Linux.
"""

from __future__ import annotations

import os
from typing import Any

from cpulaunch.agent import processes
from cpulaunch.agent.counters import Counters
from cpulaunch.discovery.cgroup import Throttling, share_lost
from cpulaunch.discovery.far_memory import far_nodes, far_share
from cpulaunch.discovery.files import read_file
from cpulaunch.model.cores import CoreSet

MAX_THREADS = 256
"""Of a program, those whose switches are counted."""


class Usage:
    """Of one program, from its start; ``cores`` are those that it runs on."""

    def __init__(self, pid: int, cores: CoreSet, now: float) -> None:
        self._pid, self._far = pid, far_nodes(cores)
        self._counters = Counters(pid)
        self._quota: tuple[float, Throttling | None] = now, processes.throttling(pid)

    def row(self, now: float) -> dict[str, Any]:
        """A row of telemetry.jsonl, but for rank and time; empty where the process has ended."""
        row = process_row(self._pid)
        if not row:
            return {}
        (before_at, before), after = self._quota, processes.throttling(self._pid)
        self._quota = now, after
        if after:
            row["throttled_seconds"] = after.seconds
        if before and after and now > before_at:
            row["throttled"] = round(share_lost(before, after, now - before_at), 3)
        if self._far and (share := far_share(self._pid, self._far)) is not None:
            row["far_memory"] = round(share, 3)
        return {**row, **self._counters.read()}


def process_row(pid: int) -> dict[str, Any]:
    """What the kernel says of a process by now; empty where it has ended."""
    text = read_file(f"/proc/{pid}/stat")
    if text is None:
        return {}
    words = text.rpartition(")")[2].split()
    row: dict[str, Any] = {
        "rss": int(words[21]) * os.sysconf("SC_PAGE_SIZE"),
        "cpu_seconds": (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK"),
        "major_faults": int(words[9]),
    }
    row["voluntary_switches"], row["switches"] = _switches(pid)
    return row


def _switches(pid: int) -> tuple[int, int]:
    """How often its threads have waited, and were preempted."""
    counts = {"voluntary_ctxt_switches": 0, "nonvoluntary_ctxt_switches": 0}
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        threads = []
    for thread in threads[:MAX_THREADS]:
        for line in (read_file(f"/proc/{pid}/task/{thread}/status") or "").splitlines()[-2:]:
            name, _, value = line.partition(":")
            if name in counts:
                counts[name] += int(value)
    voluntary, involuntary = counts.values()
    return voluntary, involuntary
