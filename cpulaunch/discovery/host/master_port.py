"""Reserve MASTER_PORT for the job until torch's store listens there.

A bound socket reserves its port even if it doesn't listen.  With SO_REUSEPORT, the same user can bind more
sockets to the port (socket(7)).  The launcher, rank 0's agent and rank 0 each bind one; torch's store listens
on another.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

C = TypeVar("C")
T = TypeVar("T")

MAX_CANDIDATES = 256
"""The largest number of ports to try for MASTER_PORT."""


def candidates(wanted: int | Literal["auto"], ports: range | None) -> list[int]:
    """Return the ports to try for MASTER_PORT, in order; 0 means any free port.

    ``ports`` is the range to choose from, or None.  Its upper half comes first, as all other listeners of the
    job take the lowest free port.
    """
    if wanted != "auto":
        return [wanted]
    if ports is None:
        return [0]
    low, high = ports[: len(ports) // 2], ports[len(ports) // 2 :]
    start = int.from_bytes(os.urandom(4), "big") % len(high)  # differs between jobs that start together
    return [*high[start:], *high[:start], *reversed(low)][:MAX_CANDIDATES]


def first_free(choices: Iterable[C], bind: Callable[[C], T]) -> T:
    """Return ``bind(choice)`` for the first of ``choices``, such as ports, that is not in use.

    Raises OSError if all are in use, or if ``bind`` fails for another reason.
    """
    *others, last = choices
    for choice in others:
        try:
            return bind(choice)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
    return bind(last)


def keep(port: int, own_port: str | None) -> socket.socket:
    """Bind a socket to reserve ``port`` on all addresses; port 0 takes a free port.

    ``own_port`` is a port that this job has already reserved (the variable KEPT_PORT).  Raises OSError if the
    port is in use.
    """

    def bind(options: tuple[int, ...]) -> socket.socket:
        return _bind(port, options)

    if str(port) == own_port:
        return first_free([(socket.SO_REUSEPORT,), (socket.SO_REUSEPORT, socket.SO_REUSEADDR)], bind)
    # With SO_REUSEADDR, other users could take the port too, so first try without it.  This attempt fails if
    # connections of an earlier job have just ended.
    kept = first_free([(), (socket.SO_REUSEADDR,)], bind)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return kept


@contextlib.contextmanager
def offered(port: int, address: str = "") -> Iterator[int]:
    """Yield the descriptor of a new socket, bound to a reserved port.

    If the caller makes the socket listen, the descriptor stays open and belongs to the caller.  The socket is
    bound to ``address`` if this is a loopback address, else to all addresses.  Raises OSError if another user
    has the port, or if another socket already listens there.
    """
    if _has_listener(port):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    # With SO_REUSEADDR, the next job can bind the port immediately after the connections have ended.
    with _bind(port, (socket.SO_REUSEPORT, socket.SO_REUSEADDR), _loopback(address)) as bound:
        fd = os.dup(bound.fileno())
        try:
            yield fd
        finally:
            if not bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                os.close(fd)  # not used


def _has_listener(port: int) -> bool:
    """Whether a socket of this host listens on ``port`` (state 0A in /proc/net/tcp, proc(5))."""
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}") as f:
                sockets = [line.split()[1:4] for line in f]
        except OSError:
            continue
        if any(local.endswith(f":{port:04X}") and state == "0A" for local, _, state in sockets):
            return True
    return False


def _loopback(address: str) -> str:
    """``address`` if it is a numeric loopback address, else an empty string."""
    try:
        return address if ipaddress.ip_address(address).is_loopback else ""
    except ValueError:
        return ""


def _bind(port: int, options: tuple[int, ...], address: str = "") -> socket.socket:
    """Bind a socket to ``port`` on ``address``, by default on all addresses."""
    six = ":" in address if address else socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if six else socket.AF_INET)
    try:
        if six:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((address or ("::" if six else ""), port))
    except BaseException:
        bound.close()
        raise
    return bound
