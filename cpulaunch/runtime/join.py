"""The rendezvous of ranks that srun or mpiexec started without cpulaunch.

These launchers give a process its rank, but not rank 0's address.  On one host, the address is the loopback
address; in a Slurm step, it is the first host's.  All ranks compute the same port from an identifier of their
start.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

import psutil

from cpulaunch import variables
from cpulaunch.errors import UsageError
from cpulaunch.launchers.other import HINT, Started, started_as

_PORTS = range(20000, 32000)
"""Ports below Linux's range for outgoing connections (ip(7), ip_local_port_range)."""

_TORCHS_PORT = 29500  # torchrun's default


def other_launchers_rank(environ: Mapping[str, str] = os.environ) -> Started | None:
    """Return the rank that srun or mpiexec gave this process; None if ``WORLD_SIZE`` is set (by torchrun).

    Also None in a job of cpulaunch, and with CPULAUNCH_SEPARATE=1.  Raises UsageError if the launcher doesn't
    give the number of ranks.
    """
    if "WORLD_SIZE" in environ or variables.JOB_ID in environ:
        return None
    separate = environ.get(variables.SEPARATE, "0")
    if separate not in ("0", "1", ""):
        raise UsageError(f"{variables.SEPARATE} is {separate!r}; valid: 0, 1")
    return None if separate == "1" else started_as(environ)


def environment_to_join(started: Started, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for torch's rendezvous.  Raises UsageError if rank 0's address is unknown."""
    joining = {"RANK": str(started.rank), "WORLD_SIZE": str(started.size), **_master(started, environ)}
    if started.local_rank is not None:
        joining["LOCAL_RANK"] = str(started.local_rank)
    if started.local_size is not None:
        joining["LOCAL_WORLD_SIZE"] = str(started.local_size)
    return joining


def _master(started: Started, environ: Mapping[str, str]) -> dict[str, str]:
    given = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    if "MASTER_ADDR" in given:
        return {"MASTER_PORT": str(_TORCHS_PORT), **given}
    address, key = started.first_host(environ), _key(started, environ)
    if not address or not key:
        what = f"{started}, on several hosts" if not address else str(started)
        raise UsageError(f"{what}, and doesn't give the address of rank 0", hint=HINT)
    port = _PORTS[zlib.crc32(key.encode()) % len(_PORTS)]
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), **given}


def _key(started: Started, environ: Mapping[str, str]) -> str:
    """Return an identifier that only the ranks of this start share: the job's, or the pid of their parent."""
    launcher = started.launcher
    if launcher.start and all(name in environ for name in launcher.start):
        return ".".join(environ[name] for name in launcher.start)
    for parent in psutil.Process().parents():
        try:
            is_rank = launcher.identity.rank in parent.environ()
        except psutil.Error:
            is_rank = False  # another user's process, such as a daemon
        if not is_rank:
            return str(parent.pid)
    return ""
