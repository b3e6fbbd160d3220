"""Kill what a job may have left.  A process belongs to a job if its environment says so."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cpulaunch import variables
from cpulaunch.wording import shortened

if TYPE_CHECKING:
    from cpulaunch.launchers.reach import Reach

TIMEOUT = 3.0
"""Seconds that another host has to let us sweep it; one that is dead can't."""

AT_ONCE = 64
"""Hosts that are swept at the same time: a connection costs this host some 50 ms of CPU time, and 6 MB."""

# What sweeps another host, where there is surely a shell.  The way there hands our own mark on only where
# somebody has told it to, so this doesn't find itself.
_SCRIPT = (
    "for p in /proc/[0-9]*; do "
    r"if tr '\0' '\n' <$p/environ | grep -qx {mark}; then kill -KILL ${{p#/proc/}}; fi; "
    "done 2>/dev/null"
)


def sweep(job_id: str) -> list[int]:
    """Kill all processes of the job ``job_id`` on this host; returns their pids."""
    mark = _mark(job_id).encode()
    killed: list[int] = []
    try:
        entries = list(Path("/proc").iterdir())
    except OSError:
        return []  # not even a descriptor is left for that
    for entry in entries:
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(int(entry.name))
        except OSError:
            pass  # not ours to read, or gone
    return killed


async def sweep_hosts(hosts: Iterable[str], job_id: str, reach: Reach) -> str:
    """Kill all processes of the job ``job_id`` on ``hosts``, as far as those can be reached.

    Returns a line on those to which nobody could be sent from here; empty where there are none.
    """
    import asyncio  # not at the top, as `execute` starts the job before it takes the time to import it

    script = _SCRIPT.format(mark=_mark(job_id))
    gate = asyncio.Semaphore(AT_ONCE)

    async def sweep_one(host: str) -> str | None:
        command = reach.command(host, script)
        async with gate:
            return await _run(command) if command else None

    names = sorted(hosts)
    errors = await asyncio.gather(*(sweep_one(host) for host in names))
    failed = {host: error for host, error in zip(names, errors, strict=True) if error}
    if not failed:
        return ""
    why = next(iter(failed.values()))
    return f"processes may be left on {shortened(list(failed))}, as ssh can't be started here: {why}"


async def _run(command: tuple[str, ...]) -> str | None:
    """Run it for TIMEOUT seconds at most; why it can't be started, or None."""
    import asyncio

    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, RuntimeError) as e:  # no more files, processes, or threads to wait for them
        return str(getattr(e, "strerror", None) or e)
    try:
        await asyncio.wait_for(process.wait(), TIMEOUT)
    except asyncio.TimeoutError:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            process.kill()
        await process.wait()
    return None


def _mark(job_id: str) -> str:
    return f"{variables.JOB_ID}={job_id}"
