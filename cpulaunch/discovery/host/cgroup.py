"""Read the limits of a process's cgroup (cpuset, CPU quota, memory), and the throttling by the quota.

Sources: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/cpusets.rst, cgroup-v1/memory.rst and
scheduler/sched-bwc.rst of Linux, and proc(5) for the two tables in ``/proc/self``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cpulaunch.discovery.host.files import Read
from cpulaunch.model.cores import CoreSet

_UNLIMITED = 1 << 60
"""In version 1 of cgroups, a memory limit above this many bytes means that there is no limit."""


class Throttling(NamedTuple):
    """How much a CPU quota has throttled its cgroup so far."""

    quota: float  # CPUs
    periods: int  # in which the cgroup was active
    throttled: int  # periods in which it exceeded the quota
    seconds: float  # total throttled time of all CPUs


def cgroup_throttling(read: Read) -> Throttling | None:
    """The throttling by the smallest CPU quota of a process; None without a quota.

    ``read`` returns files as this process sees them.
    """
    found = []
    for folder in _folders(read, "cpu"):
        if (quota := _quota(read, folder)) is not None:
            lines = (line.split() for line in (read(f"{folder}/cpu.stat") or "").splitlines())
            stat = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
            seconds = stat.get("throttled_usec", 0) / 1e6 + stat.get("throttled_time", 0) / 1e9
            found.append(Throttling(quota, stat.get("nr_periods", 0), stat.get("nr_throttled", 0), seconds))
    return min(found, default=None)


def share_lost(before: Throttling, after: Throttling, seconds: float) -> float:
    """The share (0 to 1) of the time between two observations that a quota has taken.

    Throttled time is the sum over CPUs, so it is limited to the share of throttled periods.
    """
    periods = after.periods - before.periods
    lost = (after.seconds - before.seconds) / seconds if seconds > 0 else 0.0
    hit = (after.throttled - before.throttled) / periods if periods > 0 else 0.0
    return min(lost, hit, 1.0)


def cgroup_limits(read: Read) -> tuple[CoreSet | None, float | None]:
    """The cpuset of a process, and its smallest quota in CPUs; each is None if unlimited.

    ``read`` returns files as this process sees them.  Both versions of cgroups are supported.
    """
    quotas = (_quota(read, folder) for folder in _folders(read, "cpu"))
    return _cpuset(read), min((quota for quota in quotas if quota is not None), default=None)


def memory_limit(read: Read) -> int | None:
    """The memory limit of a process in bytes; None if unlimited.

    It is the smallest ``memory.max`` or ``memory.high`` of all cgroups that contain the process.  Above
    ``memory.high``, the kernel slows the processes down.  ``read`` returns files as this process sees them.
    """
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    texts = [
        (read(f"{folder}/{name}") or "").strip() for folder in _folders(read, "memory") for name in names
    ]
    # Without a limit, version 2 has the word "max", and version 1 a huge number.
    limits = [int(text) for text in texts if text.isdigit() and int(text) < _UNLIMITED]
    return min(limits, default=None)


def _folders(read: Read, controller: str) -> Iterator[str]:
    """Yield the folders of the process's cgroups for a controller, such as ``cpu``, the innermost first."""
    mounts = list(_mounts(read))
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_version_2 = number == "0" and not controllers
        if not is_version_2 and controller not in controllers.split(","):
            continue
        for options, root, folder in mounts:
            if options is None if is_version_2 else controller in (options or ()):
                yield from _from_inside_out(folder, root, path)
                break


def _mounts(read: Read) -> Iterator[tuple[list[str] | None, str, str]]:
    """Yield controllers (None for version 2), root cgroup and mount point of each mounted hierarchy."""
    for line in (read("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) > 4 and kind and kind[0] in ("cgroup", "cgroup2"):
            options = None if kind[0] == "cgroup2" else kind[-1].split(",")
            yield options, fields[3], fields[4].replace("\\040", " ")


def _from_inside_out(mounted: str, root: str, path: str) -> list[str]:
    """The cgroup's folder, then the folders above it.

    In a container, ``path`` may be the host's path, but only the part below ``root`` is mounted.
    """
    if root != "/":
        path = path[len(root) :] if path.startswith(root) else ""
    names = [name for name in path.split("/") if name]
    return ["/".join([mounted, *names[:depth]]) for depth in range(len(names), -1, -1)]


def _cpuset(read: Read) -> CoreSet | None:
    for folder in _folders(read, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            text = read(f"{folder}/{name}")
            if text and text.strip():
                return CoreSet.parse(text)
    return None


def _quota(read: Read, folder: str) -> float | None:
    """The quota in CPUs, from ``cpu.max`` ("200000 100000" or "max 100000") or the two files of version 1."""
    words = (read(f"{folder}/cpu.max") or "").split()
    if not words:
        words = [(read(f"{folder}/cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return None
