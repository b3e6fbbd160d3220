"""Kill what a job may have left.  A process belongs to a job if its environment says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cpulaunch import variables

if TYPE_CHECKING:
    from cpulaunch.launchers.reach import Reach

TIMEOUT = 3.0
"""Seconds that another host has to let us sweep it; one that is dead can't."""

# What sweeps another host, where there is surely a shell.  The way there hands our own mark on only where
# somebody has told it to, so this doesn't find itself.
_SCRIPT = """\
for p in /proc/[0-9]*; do
  if tr '\\0' '\\n' <$p/environ | grep -qx {mark}; then kill -KILL ${{p#/proc/}}; fi
done 2>/dev/null
"""


def sweep(job_id: str) -> list[int]:
    """Kill all processes of the job ``job_id`` on this host; returns their pids."""
    mark = _mark(job_id).encode()
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


async def sweep_hosts(hosts: Iterable[str], job_id: str, reach: Reach) -> None:
    """Kill all processes of the job ``job_id`` on ``hosts``, at once, as far as those can be reached."""
    import asyncio  # not at the top, as `execute` starts the job before it takes the time to import it

    script = _SCRIPT.format(mark=_mark(job_id))
    commands = (reach.command(host, script) for host in hosts)
    await asyncio.gather(*(_run(command) for command in commands if command))


async def _run(command: tuple[str, ...]) -> None:
    import asyncio

    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return  # as where there is no ssh: the host can't be reached
    try:
        await asyncio.wait_for(process.wait(), TIMEOUT)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()


def _mark(job_id: str) -> str:
    return f"{variables.JOB_ID}={job_id}"
