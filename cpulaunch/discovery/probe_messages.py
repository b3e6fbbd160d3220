"""What hosts are asked about themselves, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANSWER_TIMEOUT = 7.0
"""Seconds that a host has to answer: ssh's own five to connect, and what Python takes to start."""

NO_PYTHON, NO_CPULAUNCH = 97, 98
"""Exit codes of our own for what the remote shell finds missing; ssh's own is 255."""


@dataclass(frozen=True)
class ProbeRequest:
    """What is asked of every host.

    ``master``: a name or address of the first host, which opens ``port`` (0: a free one) for the others to
    try.  ``interface``: the one that the user chose.  ``directory`` and ``files`` should be there,
    ``identical`` are files that must have the same content on all hosts.  ``packages`` are the directories
    that ``python`` imports from, ``libraries`` those with shared libraries to look at before the system's.
    """

    python: str
    directory: str
    files: tuple[str, ...] = ()
    identical: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    master: str | None = None
    port: int = 0
    interface: str | None = None


@dataclass(frozen=True)
class ProbeResponse:
    """What came back from a host: its answer, or why there is none.

    ``exit_code`` and ``error`` are the remote shell's (or ssh's own, 255) and what it printed; None for a
    host that was silent for ANSWER_TIMEOUT.  ``sent`` and ``received`` are when, in seconds since the epoch.
    ``connect_error``: why it couldn't reach the master.
    """

    answer: Mapping[str, Any] | None
    exit_code: int | None = None
    error: str = ""
    sent: float = 0.0
    received: float = 0.0
    connect_error: str | None = None
