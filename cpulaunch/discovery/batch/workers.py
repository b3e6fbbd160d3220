"""Wait for the workers of a job on Kubernetes.

Workers may start after the launcher, but Intel MPI and MPICH try only once to reach a host.
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
"""Seconds until the wait ends.  Pulling an image takes minutes, and name servers may know a new name only
after half a minute."""

PAUSE = 0.5
"""Seconds between two attempts."""

ATTEMPT_TIMEOUT = 5.0
"""Seconds until an attempt to connect ends."""

MAX_CONNECTIONS = 256
"""The largest number of simultaneous attempts."""

REPEAT_AFTER = 10.0
"""Seconds until the second line about the wait is printed.  The time doubles for each further line."""


def wait_for_workers(names: Sequence[str], tell: Callable[[str], None], limit: float = LIMIT) -> None:
    """Wait until an sshd answers at each of ``names``.  Raises HostError after ``limit`` seconds.

    Meanwhile, ``tell`` shows lines about missing workers at growing intervals.
    """
    port = _port(names[0])
    began = time.monotonic()
    next_line = 0.0
    total = counted(len(names), "worker")
    while missing := event_loop.run(_find_missing(names, port)):
        passed = time.monotonic() - began
        name, why = next(iter(missing.items()))
        if passed > limit:
            raise HostError(
                f"{len(missing)} of {total} could not be reached within {limit:.0f} s: {name}: {why}",
                hint="`kubectl get pods` shows whether they run, and `kubectl logs` shows the output of sshd",
            )
        if passed >= next_line:
            next_line = max(REPEAT_AFTER, 2 * next_line)
            tell(f"waiting for {len(missing)} of {total}, for {limit:.0f} s at most: {name}: {why}")
        time.sleep(PAUSE)
        names = tuple(missing)


def _port(name: str) -> int:
    """The port of the workers' sshd according to ssh's configuration."""
    try:
        done = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=ATTEMPT_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as e:
        why = cannot_run("ssh", e) if isinstance(e, OSError) else "ssh does not answer"
        raise HostError(why, hint="the image needs OpenSSH's client and server") from None
    ports = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("port "))
    return int(next(ports, 22))


async def _find_missing(names: Sequence[str], port: int) -> dict[str, str]:
    """Try to reach ``names``.  Return the names where no sshd answers, with the reasons."""
    gate = asyncio.Semaphore(MAX_CONNECTIONS)

    async def check(name: str) -> str:
        async with gate:
            try:
                return await asyncio.wait_for(_check_sshd(name, port), ATTEMPT_TIMEOUT)
            except asyncio.TimeoutError:
                return f"port {port}: no answer"
            except OSError as e:
                if e.errno and e.errno > 0:
                    return f"port {port}: {os.strerror(e.errno)}"
                return str(e.strerror or e)  # an error of the name server, or one for several addresses

    found = zip(names, await asyncio.gather(*map(check, names)), strict=True)
    return {name: why for name, why in found if why}


async def _check_sshd(name: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(name, port)
    try:
        greeting = await reader.readline()
    finally:
        writer.close()
    return "" if greeting.startswith(b"SSH-") else f"port {port}: no sshd answers there"
