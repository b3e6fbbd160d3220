"""Waits for the workers of a job on Kubernetes, whose pods and names may appear after the launcher.

Intel MPI and MPICH try a host once.  Source: kubeflow/mpi-operator, pull request 417.
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
"""Seconds that workers may take to be there.  A name server may repeat for half a minute that there is no
such name, and an image takes minutes to arrive."""

PAUSE = 0.5
"""Seconds between two looks at the workers that aren't there."""

TRY = 5.0
"""Seconds that a look may take."""

AT_ONCE = 256
"""Workers that are looked at at the same time."""

FIRST_AGAIN = 10.0
"""Seconds until a second line says what we wait for; each next one comes after twice as long."""


def wait_for_workers(names: Sequence[str], tell: Callable[[str], None], limit: float = LIMIT) -> None:
    """Return when each of ``names`` stands for an address at which an sshd answers.

    ``tell`` gets a line that says what is waited for, where that is not so at once, and further ones now and
    then.  Raises HostError after ``limit`` seconds.
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
    """The port that ssh's configuration has for a worker; it is the same for all."""
    try:
        done = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=TRY)
    except (OSError, subprocess.TimeoutExpired) as e:
        why = cannot_run("ssh", e) if isinstance(e, OSError) else "ssh does not answer"
        raise HostError(why, hint="the image needs OpenSSH's client and server") from None
    ports = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("port "))
    return int(next(ports, 22))


async def _look(names: Sequence[str], port: int) -> dict[str, str]:
    """Those of ``names`` at which no sshd answers, each with the reason."""
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
                return str(e.strerror or e)  # a name server's answer, or that of several addresses

    found = zip(names, await asyncio.gather(*map(visit, names)), strict=True)
    return {name: why for name, why in found if why}


async def _why_not(name: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(name, port)
    try:
        greeting = await reader.readline()
    finally:
        writer.close()
    return "" if greeting.startswith(b"SSH-") else f"port {port}: no sshd answers there"
