"""Kill what a job may have left.  A process belongs to a job if its environment says so."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cpulaunch import variables
from cpulaunch.model.hosts import fold_hosts

if TYPE_CHECKING:
    from cpulaunch.launchers.reach import Reach

TIMEOUT = 3.0
"""Seconds that another host has to let us sweep it; one that is dead can't."""

PATIENCE = 10.0
"""The same where another attempt is to follow there, and the host was heard until the end."""

AT_ONCE = 64
"""Hosts that are swept at the same time: a connection costs this host some 50 ms of CPU time, and 6 MB."""

LEFT = 86
"""The exit code of what sweeps another host, where something is left there."""

# What sweeps another host, where there is surely a shell.  The way there hands
# our own mark on only where somebody has told it to, so this doesn't find itself.
_SCRIPT = (
    "for i in 1 2 3 4 5; do "
    r"set -- $(grep -lzxF {mark} /proc/[0-9]*/environ 2>/dev/null | tr -dc '0-9\n'); "
    "test $# = 0 && exit 0; kill -KILL $@ 2>/dev/null; sleep 0.1; done; exit {left}"
)


class Unswept(NamedTuple):
    """A host that may have something of the job left, and why.  ``ours``: nobody could be sent from here."""

    host: str
    why: str
    ours: bool = False


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


async def sweep_hosts(
    hosts: Iterable[str], job_id: str, reach: Reach, patience: float = TIMEOUT
) -> list[Unswept]:
    """Kill all processes of the job ``job_id`` on ``hosts``.  Returns those where it may have some left.

    Each host has ``patience`` seconds.
    """
    import asyncio  # not at the top, as `execute` starts the job before it takes the time to import it

    script = _SCRIPT.format(mark=_mark(job_id), left=LEFT)
    gate = asyncio.Semaphore(AT_ONCE)

    async def sweep_one(host: str) -> Unswept | None:
        command = reach.command(host, script)
        async with gate:
            return await _run(host, command, patience, reach.program) if command else None

    return [left for left in await asyncio.gather(*map(sweep_one, sorted(hosts))) if left]


def of_ours(unswept: Sequence[Unswept], program: str = "ssh") -> str:
    """A line on the hosts to which nobody could be sent from here; empty where there are none."""
    failed = [left for left in unswept if left.ours]
    if not failed:
        return ""
    hosts = fold_hosts(left.host for left in failed)
    return f"processes may be left on {hosts}, as {program} can't be started here: {failed[0].why}"


async def _run(host: str, command: tuple[str, ...], patience: float, program: str) -> Unswept | None:
    """Run it for ``patience`` seconds at most."""
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
        return Unswept(host, str(getattr(e, "strerror", None) or e), ours=True)
    try:
        code = await asyncio.wait_for(process.wait(), patience)
    except asyncio.TimeoutError:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            process.kill()
        await process.wait()
        return Unswept(host, f"it has not answered within {patience:g} s")
    if code == 0:
        return None
    return Unswept(
        host, "processes of the job are left there" if code == LEFT else f"{program} can't reach it"
    )


def _mark(job_id: str) -> str:
    return f"{variables.JOB_ID}={job_id}"
