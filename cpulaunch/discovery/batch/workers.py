"""Wait for the workers of a job on Kubernetes.

Their pods and names may appear after the launcher, and Intel MPI and MPICH try to reach a host only once.
Source: kubeflow/mpi-operator, pull request 417.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Sequence

from cpulaunch.discovery.probe import event_loop
from cpulaunch.errors import HostError
from cpulaunch.wording import cannot_run, counted

LIMIT = 300.0
"""Seconds that workers may take to be ready.  A name server may report a new name as unknown for half a
minute, and pulling an image takes minutes."""

PAUSE = 0.5
"""Seconds between two attempts to reach the missing workers."""

TRY = 5.0
"""Seconds that an attempt may take."""

AT_ONCE = 256
"""The largest number of workers that are tried at the same time."""

FIRST_AGAIN = 10.0
"""Seconds until the second line about the wait.  The time doubles for each further line."""


def wait_for_workers(names: Sequence[str], tell: Callable[[str], None], limit: float = LIMIT) -> None:
    """Wait until an sshd answers at each of ``names``.

    If not all answer at once, ``tell`` gets a line about the missing workers, and further lines at growing
    intervals.  Raises HostError after ``limit`` seconds.
    """
    port = _port(names[0])
    began = time.monotonic()
    next_line = 0.0
    total = counted(len(names), "worker")
    while missing := event_loop.run(_look(names, port)):
        passed = time.monotonic() - began
        name, why = next(iter(missing.items()))
        if passed > limit:
            raise HostError(
                f"{len(missing)} of {total} could not be reached within {limit:.0f} s: {name}: {why}",
                hint="`kubectl get pods` shows whether they run, and `kubectl logs` what their sshd says",
            )
        if passed >= next_line:
            next_line = max(FIRST_AGAIN, 2 * next_line)
            tell(f"waiting for {len(missing)} of {total}, for {limit:.0f} s at most: {name}: {why}")
        time.sleep(PAUSE)
        names = tuple(missing)


def _port(name: str) -> int:
    """The port of a worker's sshd according to ssh's configuration; it is the same for all workers."""
    try:
        done = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=TRY)
    except (OSError, subprocess.TimeoutExpired) as e:
        why = cannot_run("ssh", e) if isinstance(e, OSError) else "ssh does not answer"
        raise HostError(why, hint="the image needs OpenSSH's client and server") from None
    ports = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("port "))
    return int(next(ports, 22))


async def _look(names: Sequence[str], port: int) -> dict[str, str]:
    """Try to reach ``names``.  Returns the names at which no sshd answers, with the reasons."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def visit(name: str) -> str:
        async with gate:
            try:
                return await asyncio.wait_for(_why_not(name, port), TRY)
            except asyncio.TimeoutError:
                return f"port {port}: no answer"
            except OSError as e:
                if e.errno and e.errno > 0:
                    return f"port {port}: {os.strerror(e.errno)}"
                return str(e.strerror or e)  # an error of the name server, or of several addresses

    found = zip(names, await asyncio.gather(*map(visit, names)), strict=True)
    return {name: why for name, why in found if why}


async def _why_not(name: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(name, port)
    try:
        greeting = await reader.readline()
    finally:
        writer.close()
    return "" if greeting.startswith(b"SSH-") else f"port {port}: no sshd answers there"
