"""Hardware counters of the program: cycles, instructions, and cycles in which AMX was busy.

The agent opens them with ``perf_event_open``; nothing runs in the program.  They count user-mode events of
the program's main thread and of all threads started later.  Most virtual machines have no counters, and the
kernel may forbid them.

Sources: perf_event_open(2); ``include/uapi/linux/perf_event.h`` of Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Mapping

_CALL = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
"""Machine → number of the system call ``perf_event_open``."""

_HARDWARE, _RAW = 0, 4
"""Types of events (``PERF_TYPE_…``)."""

_CYCLES, _INSTRUCTIONS = 0, 1

_AMX_BUSY = 0x02B7
"""EXE.AMX_BUSY, event 0xb7 with umask 0x02, of all CPUs with AMX.

Source: ``SPR/events/sapphirerapids_core.json`` of github.com/intel/perfmon.
"""

_ATTRIBUTES = struct.Struct("=IIQQQQQ16x")
"""``struct perf_event_attr``, its first version: type, size, config, 0, 0, read format, flags."""

_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR, _INHERIT_THREAD = 1 << 1, 1 << 5, 1 << 6, 1 << 35
_TIMES = 1 | 2  # the read format: time enabled and time running
_CLOSE_ON_EXEC = 8

Events = Mapping[str, tuple[int, int]]
"""Name → type and number of an event."""


def events_of_cpu(cpuinfo: str) -> Events:
    """The events to count on the first CPU in ``cpuinfo``, a text like ``/proc/cpuinfo``."""
    found = {"cycles": (_HARDWARE, _CYCLES), "instructions": (_HARDWARE, _INSTRUCTIONS)}
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    cpu = {name.strip(): value.split() for name, _, value in lines}
    if cpu.get("vendor_id") == ["GenuineIntel"] and "amx_tile" in cpu.get("flags", ()):
        found["amx_busy"] = (_RAW, _AMX_BUSY)
    return found


class Counters:
    """The counters of one program."""

    def __init__(self, pid: int, events: Events | None = None) -> None:
        """Open counters of ``events``, by default those of this CPU.  Skip events that the kernel refuses."""
        self._files: dict[str, int] = {}
        for name, event in (events_of_cpu(_first_cpu()) if events is None else events).items():
            # Before Linux 5.13, the counters include the program's child processes.
            fd = _open(pid, event, _INHERIT | _INHERIT_THREAD)
            if (fd := _open(pid, event, _INHERIT) if fd < 0 else fd) >= 0:
                self._files[name] = fd

    def read(self) -> dict[str, int]:
        """Read the counts so far.

        If the CPU has too few counters, the kernel counts the events in turn.  Each count is then scaled to
        the whole time.
        """
        found = {}
        for name, fd in self._files.items():
            try:
                count, wanted, counted = struct.unpack("=QQQ", os.read(fd, 24))
            except (OSError, struct.error):
                continue
            if counted:
                found[name] = count if counted == wanted else round(count * wanted / counted)
        return found

    def close(self) -> None:
        for fd in self._files.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._files = {}


def _first_cpu() -> str:
    """The beginning of /proc/cpuinfo.  Reading all of it is slow on hosts with hundreds of CPUs."""
    try:
        with open("/proc/cpuinfo") as file:
            return file.read(8192)
    except OSError:
        return ""


def _open(pid: int, event: tuple[int, int], flags: int) -> int:
    """Open an event of the process ``pid``, and return its descriptor, or -1 on failure."""
    if (number := _CALL.get(os.uname().machine)) is None:
        return -1
    kind, config = event
    flags |= _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
    text = _ATTRIBUTES.pack(kind, _ATTRIBUTES.size, config, 0, 0, _TIMES, flags)
    call = ctypes.CDLL(None, use_errno=True).syscall
    return int(call(number, text, pid, -1, -1, _CLOSE_ON_EXEC))
