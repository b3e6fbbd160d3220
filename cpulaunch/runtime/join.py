"""Ranks that another launcher started: the variables by which torch lets them meet.

srun and mpiexec give a process its rank, but not rank 0's address.  On one host that is loopback; a Slurm
step names its hosts.  All ranks derive the same port from what they know of their start.
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
"""Ports below those that Linux gives to outgoing connections (ip(7), ip_local_port_range)."""

_TORCHS_PORT = 29500


def other_launchers_rank(environ: Mapping[str, str] = os.environ) -> Started | None:
    """Return this process's rank from another launcher; None in a rank of cpulaunch, torchrun, …

    Also None if CPULAUNCH_SEPARATE keeps processes apart.  Raises UsageError if a launcher doesn't say how
    many ranks there are.
    """
    if "WORLD_SIZE" in environ or variables.JOB_ID in environ or _are_separate(environ):
        return None
    return started_as(environ)


def environment_to_join(started: Started, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables by which torch's ranks meet.  Raises UsageError if rank 0's address is unknown."""
    joining = {"RANK": str(started.rank), "WORLD_SIZE": str(started.size), **_meeting(started, environ)}
    if started.local_rank is not None:
        joining["LOCAL_RANK"] = str(started.local_rank)
    if started.local_size is not None:
        joining["LOCAL_WORLD_SIZE"] = str(started.local_size)
    return joining


def _are_separate(environ: Mapping[str, str]) -> bool:
    text = environ.get(variables.SEPARATE, "0")
    if text not in ("0", "1", ""):
        raise UsageError(f"{variables.SEPARATE} is {text!r}; valid: 0, 1")
    return text == "1"


def _meeting(started: Started, environ: Mapping[str, str]) -> dict[str, str]:
    given = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    if "MASTER_ADDR" in given:
        return {"MASTER_PORT": str(_TORCHS_PORT), **given}
    address, key = started.first_host(environ), _key(started, environ)
    if not address or not key:
        what = f"{started}, on several hosts" if not address else str(started)
        raise UsageError(f"{what}, and doesn't say where rank 0 listens", hint=HINT)
    port = _PORTS[zlib.crc32(key.encode()) % len(_PORTS)]
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), **given}


def _key(started: Started, environ: Mapping[str, str]) -> str:
    """Return a key that only the ranks of this start share: its number, or the pid of their parent."""
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
