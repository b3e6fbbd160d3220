"""Keep MASTER_PORT for the job from its choice until torch's store listens there.

A bound socket keeps its port even if it doesn't listen.  If it has SO_REUSEPORT, more sockets can be bound to
the port, but only by the same user (socket(7)): those of the launcher, of the first rank's agent and program,
and the one on which torch's store listens.
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

MOST_TRIED = 256
"""Ports of a range that are tried for MASTER_PORT."""


def candidates(wanted: int | Literal["auto"], ports: range | None) -> list[int]:
    """Return the ports to try for MASTER_PORT, in order; 0 is any free one.

    ``ports`` are those to choose from, or None.  The upper half comes first: everything else that listens
    takes the lowest free port, and must not take this one before the ranks start.
    """
    if wanted != "auto":
        return [wanted]
    if ports is None:
        return [0]
    low, high = ports[: len(ports) // 2], ports[len(ports) // 2 :]
    start = int.from_bytes(os.urandom(4), "big") % len(high)  # so that jobs that start together differ
    return [*high[start:], *high[:start], *reversed(low)][:MOST_TRIED]


def first_free(choices: Iterable[C], bind: Callable[[C], T]) -> T:
    """Return ``bind(choice)`` for the first of ``choices``, such as ports, that is not in use.

    Raises the last OSError if all are in use, and any other OSError at once.
    """
    *others, last = choices
    for choice in others:
        try:
            return bind(choice)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
    return bind(last)


def keep(port: int, ours: str | None) -> socket.socket:
    """Bind a socket that keeps ``port`` on all addresses; port 0 takes a free one.

    ``ours`` is the port that this user's job keeps already (the variable KEPT_PORT).  Raises OSError if the
    port is in use.
    """

    def bind(options: tuple[int, ...]) -> socket.socket:
        return _bound(port, options)

    if str(port) == ours:
        return first_free([(socket.SO_REUSEPORT,), (socket.SO_REUSEPORT, socket.SO_REUSEADDR)], bind)
    # With SO_REUSEADDR, other users could take the port as well, so try without it first.  That fails if
    # connections of an earlier job have just ended.
    kept = first_free([(), (socket.SO_REUSEADDR,)], bind)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return kept


@contextlib.contextmanager
def offered(port: int, address: str = "") -> Iterator[int]:
    """Give the descriptor of a socket bound to a port that we keep, which the caller may listen on.

    If the socket listens at the end, the descriptor stays open and belongs to the caller; else it is closed.
    The socket is bound to all addresses, or to ``address`` alone if that is a loopback address.  Raises
    OSError if another user has the port, or if any socket listens there already.
    """
    if _listened_on(port):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    # Its connections inherit SO_REUSEADDR, so that the next job can bind the port as soon as they have ended.
    with _bound(port, (socket.SO_REUSEPORT, socket.SO_REUSEADDR), _loopback(address)) as bound:
        fd = os.dup(bound.fileno())
        try:
            yield fd
        finally:
            if not bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                os.close(fd)  # not used


def _listened_on(port: int) -> bool:
    """Whether a socket of this host listens on ``port``: the state 0A in /proc/net/tcp (proc(5))."""
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


def _bound(port: int, options: tuple[int, ...], address: str = "") -> socket.socket:
    """Bind a socket with these options to ``port``, on ``address`` or, by default, on all addresses."""
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
