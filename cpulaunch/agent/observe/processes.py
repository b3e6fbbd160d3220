"""The states of the program and its children, and the files and locks that they wait for, from /proc.

No function here blocks.  For a process in uninterruptible sleep, they read only files in /proc that don't
need the process's locks.  Sources: proc(5); Documentation/filesystems/proc.rst of Linux.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, NamedTuple

from cpulaunch.agent.launch.child import command_line
from cpulaunch.discovery.host.cgroup import Throttling, cgroup_throttling, share_lost
from cpulaunch.discovery.host.files import read_file

MAX_BLOCKED = 8
"""The largest number of blocked threads that are described per process."""

_WORDS = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk",
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}

_CALLS = {
    "x86_64": "read=0 write=1 open=2 close=3 stat=4 fstat=5 lseek=8 ioctl=16 pread=17 pwrite=18 readv=19 "
    "writev=20 sendfile=40 flock=73 fsync=74 fdatasync=75 ftruncate=77 getdents=78 rename=82 mkdir=83 "
    "unlink=87 getdents=217 openat=257 newfstatat=262 unlinkat=263 fallocate=285 preadv=295 pwritev=296 "
    "copy_file_range=326 statx=332",
    "aarch64": "flock=32 ioctl=29 unlinkat=35 ftruncate=46 fallocate=47 openat=56 close=57 getdents=61 "
    "lseek=62 read=63 write=64 readv=65 writev=66 pread=67 pwrite=68 preadv=69 pwritev=70 sendfile=71 "
    "newfstatat=79 fstat=80 fsync=82 fdatasync=83 copy_file_range=285 statx=291",
}
"""Machine → names and numbers of the system calls that may wait for a file.

Sources: ``asm/unistd_64.h``, ``asm-generic/unistd.h``.
"""

_OF_PATHS = ("open", "stat", "rename", "mkdir", "unlink", "openat", "newfstatat", "unlinkat", "statx")
"""System calls of `_CALLS` whose first argument is not the file's descriptor."""


class Stat(NamedTuple):
    """Fields of ``/proc/PID/stat``.

    ``cpu`` is the CPU time in seconds, ``started`` the start time in clock ticks since boot, ``rss`` the
    memory in bytes, and ``stopped_by`` the number of the signal that stopped the process, or 0.
    """

    name: str
    state: str
    parent: int
    major_faults: int
    cpu: float
    started: int
    rss: int
    stopped_by: int


def stat(pid: int, thread: int | None = None) -> Stat | None:
    """Read the state of a process, or of one of its threads.  None if it has ended."""
    text = read_file(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
    if text is None:
        return None
    begin, _, rest = text.rpartition(")")
    words = rest.split()
    stopped_by = int(words[49]) if words[0] == "T" and len(words) > 49 else 0
    return Stat(
        name=begin.partition("(")[2],
        state=words[0],
        parent=int(words[1]),
        major_faults=int(words[9]),
        cpu=(int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK"),
        started=int(words[19]),
        rss=int(words[21]) * os.sysconf("SC_PAGE_SIZE"),
        stopped_by=stopped_by & 0x7F,
    )


def family(ancestor: int) -> list[int]:
    """All living descendants of a process, parents before their children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := stat(int(name))):
            children.setdefault(found.parent, []).append(int(name))
    members = sorted(children.get(ancestor, []))
    for pid in members:  # the list grows in the loop
        members += sorted(children.get(pid, []))
    return members


def describe(pid: int) -> dict[str, Any] | None:
    """Describe a process in the form of ``Dump.processes``, without its threads.  None if it has ended.

    Later, ``threads`` holds the stacks, ``stacks`` the name of the tool that has read them, and ``lacking``
    the reason why a better tool failed.  ``python`` becomes false if a tool detects another language.
    """
    found = stat(pid)
    if found is None:
        return None
    status = _status(pid)
    held = blocked(pid)
    waiting = _waits_in(pid, pid) if found.state in "SD" else {"call": None, "file": None}
    tracer = int(status.get("TracerPid", "0"))
    return {
        "pid": pid,
        "parent": found.parent,
        # Reading /proc/PID/cmdline may wait for a lock of a blocked thread.
        "command": found.name if held or found.state in "DZX" else command_line(pid),
        "state": found.state,
        "word": _WORDS.get(found.state, found.state),
        "stopped_by": _signal_name(found.stopped_by),
        "wchan": _wchan(pid, pid),
        **waiting,
        "blocked": held,
        "traced_by": tracer,
        "tracer": ((by := stat(tracer)) and by.name) if tracer else None,
        "swapped": int(status.get("VmSwap", "0 kB").split()[0]),
        "cpu": round(found.cpu, 2),
        "throttled": None,
        "threads": [],
        "stacks": "",
        "lacking": "",
        "python": True,
    }


def blocked(pid: int) -> list[dict[str, Any]]:
    """Describe the threads in uninterruptible sleep (state D), mostly due to a disk or file server."""
    found = []
    for thread in threads(pid):
        status = stat(pid, thread)
        if status and status.state == "D":
            waiting = _waits_in(pid, thread)
            found.append({"thread": thread, "name": status.name, "wchan": _wchan(pid, thread), **waiting})
    return found[:MAX_BLOCKED]


def threads(pid: int) -> list[int]:
    """The thread ids of a process in order; empty if it has ended."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []


def catches(pid: int, number: int) -> bool:
    return bool(int(_status(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def throttling(pid: int) -> Throttling | None:
    """The throttling of a process by its cgroups' CPU quotas so far; None without quotas."""
    return cgroup_throttling(lambda path: read_file(path.replace("/proc/self/", f"/proc/{pid}/")))


def throttled(before: Throttling, after: Throttling, seconds: float) -> dict[str, Any]:
    """The effect of a quota between two observations, ``seconds`` apart.

    ``share`` is the share of this time that was lost; ``seconds`` is the time lost since the cgroup's start.
    """
    share = round(share_lost(before, after, seconds), 3)
    return {"share": share, "seconds": round(after.seconds, 1), "quota": after.quota}


def _waits_in(pid: int, thread: int) -> dict[str, Any]:
    """The system call on a file in which a thread waits, and the file; each is None if unknown."""
    words = (read_file(f"/proc/{pid}/task/{thread}/syscall") or "").split()
    if len(words) < 2 or not words[0].isdigit():
        return {"call": None, "file": None}
    pairs = (each.partition("=") for each in _CALLS.get(os.uname().machine, "").split())
    call = next((name for name, _, number in pairs if number == words[0]), None)
    file = None
    if call and call not in _OF_PATHS:
        with contextlib.suppress(OSError):
            file = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")[-200:]
    return {"call": call, "file": file}


def _wchan(pid: int, thread: int) -> str | None:
    """The kernel function in which a thread waits; None if it doesn't wait or the kernel hides it."""
    text = read_file(f"/proc/{pid}/task/{thread}/wchan")
    return text if text and text != "0" else None


def _status(pid: int) -> dict[str, str]:
    lines = (read_file(f"/proc/{pid}/status") or "").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _signal_name(number: int) -> str | None:
    try:
        return signal.Signals(number).name if number else None
    except ValueError:
        return f"signal {number}"
