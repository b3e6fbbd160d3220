"""Kill leftover processes of a job, which have the job's id in their environment."""

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
"""Seconds that the sweep of another host may take; a dead host never answers."""

PATIENCE = 10.0
"""Seconds for the sweep of a host that has answered until the end, and may run another attempt."""

AT_ONCE = 64
"""Hosts to sweep at the same time: a connection costs this host about 50 ms of CPU time, and 6 MB."""

LEFT = 86
"""The exit code of ``_SCRIPT`` if processes are left on the host."""

# Runs in the shell of another host.  It doesn't kill itself, because ssh doesn't pass on the job's id.
_SCRIPT = (
    "for i in 1 2 3 4 5; do "
    r"set -- $(grep -lzxF {mark} /proc/[0-9]*/environ 2>/dev/null | tr -dc '0-9\n'); "
    "test $# = 0 && exit 0; kill -KILL $@ 2>/dev/null; sleep 0.1; done; exit {left}"
)


class Unswept(NamedTuple):
    """A host on which processes of the job may be left, and why.

    ``ours``: the command that sweeps the host couldn't be started here.
    """

    host: str
    why: str
    ours: bool = False


def sweep(job_id: str) -> None:
    """Kill all processes of the job ``job_id`` on this host."""
    mark = _mark(job_id).encode()
    try:
        entries = list(Path("/proc").iterdir())
    except OSError:
        return  # no file descriptor is left
    for entry in entries:
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            pass  # not ours to read, or gone


async def sweep_hosts(
    hosts: Iterable[str], job_id: str, reach: Reach, patience: float = TIMEOUT
) -> list[Unswept]:
    """Kill all processes of the job ``job_id`` on ``hosts``, and return the hosts where some may be left.

    Each host has ``patience`` seconds.
    """
    import asyncio  # imported late: `execute` starts the job first, as this import takes long

    script = _SCRIPT.format(mark=_mark(job_id), left=LEFT)
    gate = asyncio.Semaphore(AT_ONCE)

    async def sweep_one(host: str) -> Unswept | None:
        command = reach.command(host, script)
        async with gate:
            return await _run(host, command, patience, reach.program) if command else None

    return [left for left in await asyncio.gather(*map(sweep_one, sorted(hosts))) if left]


def local_failures(unswept: Sequence[Unswept], program: str = "ssh") -> str:
    """Return a line on hosts whose sweep couldn't be started here; empty if there are none."""
    failed = [left for left in unswept if left.ours]
    if not failed:
        return ""
    hosts = fold_hosts(left.host for left in failed)
    return f"processes may be left on {hosts}, because {program} can't be started here: {failed[0].why}"


async def _run(host: str, command: tuple[str, ...], patience: float, program: str) -> Unswept | None:
    """Run ``command``, which sweeps ``host``, for at most ``patience`` seconds."""
    import asyncio

    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, RuntimeError) as e:  # out of file descriptors, processes or threads
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
