"""End what is left of a job: its starters, and what they have left on other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence

from cpulaunch.launchers.reach import SSH

SWEEP_TIMEOUT = 3.0
"""Seconds that a host has to let us sweep it; one that is dead can't."""

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGKILL)
"""What a starter is sent in turn: Intel's and Open MPI's want SIGINT twice after a lost link."""

_PAUSE = 0.7
"""Seconds between those."""

# What a sweep says on a host that we reach by ssh, where there is surely a shell.  ssh hands our own mark on
# only where somebody has told it to, so this doesn't find itself.
_SWEEP = """\
for p in /proc/[0-9]*; do
  if tr '\\0' '\\n' <$p/environ | grep -qx CPULAUNCH_JOB_ID={job_id}; then kill -KILL ${{p#/proc/}}; fi
done 2>/dev/null
"""


async def sweep_hosts(hosts: Iterable[str], job_id: str) -> None:
    """Kill all processes of the job ``job_id`` on ``hosts``, at once, as far as those answer."""
    await asyncio.gather(*(_sweep_host(host, job_id) for host in hosts))


async def _sweep_host(host: str, job_id: str) -> None:
    ssh = await asyncio.create_subprocess_exec(
        SSH,
        host,
        _SWEEP.format(job_id=job_id),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        await asyncio.wait_for(ssh.wait(), SWEEP_TIMEOUT)
    except asyncio.TimeoutError:
        ssh.kill()
        await ssh.wait()


async def end_starters(
    starters: Sequence[subprocess.Popen[bytes]], patience: float, child_ended: asyncio.Event
) -> None:
    """Wait until the starters have ended; those that don't within ``patience`` seconds are made to.

    ``child_ended`` is set at each SIGCHLD.
    """
    for number in (None, *_ENDING_SIGNALS):
        if number is not None:
            for starter in running(starters):
                starter.send_signal(number)
        deadline = time.monotonic() + (patience if number is None else _PAUSE)
        while running(starters) and (left := deadline - time.monotonic()) > 0:
            child_ended.clear()
            if running(starters):  # none has ended since the question was asked
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(child_ended.wait(), left)


def running(starters: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Those that haven't ended."""
    return [starter for starter in starters if starter.poll() is None]
