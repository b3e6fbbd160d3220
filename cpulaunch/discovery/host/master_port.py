"""The port where ranks meet, kept for the job from its choice until torch's store listens there.

A socket that is bound keeps its port, though it doesn't listen.  Where it has SO_REUSEPORT, further sockets
can be bound there, but only by the same user (socket(7)): those of the launcher, of the first rank's agent
and program, and the one on which torch's store listens.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator


def keep(port: int, ours: str | None) -> socket.socket:
    """A socket that keeps a port, on all addresses; 0 takes a free one.  OSError where it is in use.

    ``ours`` is the port that this user's job keeps already, as the environment says (KEPT_PORT).
    """
    if str(port) == ours:
        return _first_bound(port, ((socket.SO_REUSEPORT,), (socket.SO_REUSEPORT, socket.SO_REUSEADDR)))
    # Connections of an earlier job that have just ended are in the way of a socket without SO_REUSEADDR; with
    # it, other users could take the port as well.
    kept = _first_bound(port, ((), (socket.SO_REUSEADDR,)))
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return kept


@contextlib.contextmanager
def offered(port: int, address: str = "") -> Iterator[int]:
    """The descriptor of a socket on a port that we keep, for somebody who may listen on it and then owns it.

    It is on all addresses, but on a loopback ``address`` alone where ranks come to that.  OSError where
    somebody else has the port, or listens there already.
    """
    if _listened_on(port):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    # Its connections get SO_REUSEADDR, too: when they have ended, the next job can have the port at once.
    with _bound(port, (socket.SO_REUSEPORT, socket.SO_REUSEADDR), _loopback(address)) as bound:
        fd = os.dup(bound.fileno())
        try:
            yield fd
        finally:
            if not bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                os.close(fd)  # nobody has taken it


def _listened_on(port: int) -> bool:
    """Whether a socket of this host listens on ``port``: its state in net/tcp is 0A (proc(5))."""
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}") as f:
                sockets = [line.split()[1:4] for line in f]
        except OSError:
            continue
        if any(local.endswith(f":{port:04X}") and state == "0A" for local, _, state in sockets):
            return True
    return False


def _first_bound(port: int, attempts: tuple[tuple[int, ...], ...]) -> socket.socket:
    """A socket that could be bound with the options of one of ``attempts``."""
    *others, last = attempts
    for options in others:
        try:
            return _bound(port, options)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
    return _bound(port, last)


def _loopback(address: str) -> str:
    """``address``, if it is a number and one of loopback; else nothing."""
    try:
        return address if ipaddress.ip_address(address).is_loopback else ""
    except ValueError:
        return ""


def _bound(port: int, options: tuple[int, ...], address: str = "") -> socket.socket:
    """A socket on ``port`` of an address, or of all."""
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
