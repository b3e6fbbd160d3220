"""The resource use of a rank's process, as the kernel reports it: memory, CPU time, switches, throttling.

Sources: proc(5); Documentation/filesystems/proc.rst of Linux.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cpulaunch.agent.observe import processes
from cpulaunch.agent.observe.counters import Counters
from cpulaunch.discovery.host.cgroup import Throttling, share_lost
from cpulaunch.discovery.host.far_memory import far_nodes, far_share
from cpulaunch.discovery.host.files import read_file
from cpulaunch.model.cores import CoreSet

MAX_THREADS = 256
"""The largest number of threads whose context switches are counted."""


class Switches(NamedTuple):
    """The numbers of a thread's voluntary context switches and preemptions."""

    voluntary: int
    preempted: int


class Usage:
    """The resource use of one program, which runs on ``cores``."""

    def __init__(self, pid: int, cores: CoreSet, now: float) -> None:
        self._pid, self._far = pid, far_nodes(cores)
        self._counters = Counters(pid)
        self._quota: tuple[float, Throttling | None] = now, processes.throttling(pid)
        self._switches: dict[int, Switches] = {}  # thread id → its last known counts
        self._of_ended = Switches(0, 0)

    def row(self, now: float) -> dict[str, Any]:
        """A row of telemetry.jsonl without rank and time.  Empty if the process has ended."""
        row = process_row(self._pid)
        if not row:
            return {}
        row["voluntary_switches"], row["switches"] = self._count_switches()
        (before_at, before), after = self._quota, processes.throttling(self._pid)
        self._quota = now, after
        if after:
            row["throttled_seconds"] = after.seconds
        if before and after and now > before_at:
            row["throttled"] = round(share_lost(before, after, now - before_at), 3)
        if self._far and (share := far_share(self._pid, self._far)) is not None:
            row["far_memory"] = round(share, 3)
        return {**row, **self._counters.read()}

    def _count_switches(self) -> Switches:
        """The sums over all threads, with the last known values of ended threads."""
        found = switches(self._pid)
        none = Switches(0, 0)
        gone = (each for thread, each in self._switches.items() if found.get(thread, none) < each)
        self._of_ended, self._switches = _sum(self._of_ended, *gone), found
        return _sum(self._of_ended, *found.values())


def _sum(*several: Switches) -> Switches:
    return Switches(*map(sum, zip(*several, strict=True)))


def process_row(pid: int) -> dict[str, Any]:
    """Memory (bytes), CPU time (seconds) and major page faults of a process; empty if it has ended."""
    if (found := processes.stat(pid)) is None:
        return {}
    return {"rss": found.rss, "cpu_seconds": found.cpu, "major_faults": found.major_faults}


def switches(pid: int) -> dict[int, Switches]:
    """The context switches of at most MAX_THREADS threads of a process, by thread id."""
    found = {}
    for thread in processes.threads(pid)[:MAX_THREADS]:
        lines = (read_file(f"/proc/{pid}/task/{thread}/status") or "").splitlines()[-2:]
        if lines and lines[-1].startswith("nonvoluntary_ctxt_switches"):
            found[thread] = Switches(*(int(line.split()[1]) for line in lines))
    return found
