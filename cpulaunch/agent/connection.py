"""A connection to the launcher, which may still be being made."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from cpulaunch.wire import Lines

RETRANSMISSIONS = 3
"""The network counts as cut once the kernel has repeated data this often without an answer (1.4 s)."""


class Silence(NamedTuple):
    """How long the other host has been silent, from the kernel's ``tcp_info`` (tcp(7)).

    ``seconds`` is the time since its last acknowledgement.  ``unacknowledged`` says that data
    repeated ``RETRANSMISSIONS`` times is still not acknowledged.
    """

    seconds: float
    unacknowledged: bool


class Connection:
    """A socket with its unsent and unread data.

    ``salt`` is the challenge that the launcher has to answer.  The connection goes through three states:
    ``connected`` (the launcher's host has answered), ``greeted`` (challenge and hello have been exchanged),
    and ``welcome`` (the launcher has accepted the agent).
    """

    def __init__(
        self, family: int, address: Any, selector: selectors.BaseSelector, owner: Any, patience: float
    ) -> None:
        """Begin to connect.  When the socket is ready, call ``owner.ready(connection, events)``.

        While nothing else is sent, the kernel sends a few keepalives within ``patience`` seconds.  Raises
        OSError.
        """
        self.salt = os.urandom(16).hex()
        self.greeted = self.welcome = self.connected = False
        self.began = time.monotonic()
        self._owner, self._selector, self._local = owner, selector, family == socket.AF_UNIX
        self._lines, self._outgoing = Lines(), bytearray()
        self._broken: OSError | None = None  # the error of a write
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        if not self._local:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # While we send nothing, only keepalives show that the host is gone.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            seconds = max(1, int(patience / 3))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        try:
            self._socket.connect(address)
        except OSError as e:
            if e.errno != errno.EINPROGRESS:
                self._socket.close()
                raise
        self.open = True
        self._selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    @property
    def unsent(self) -> int:
        """The number of bytes not yet handed to the kernel."""
        return len(self._outgoing)

    def ready(self, events: int) -> Any:
        """Call the owner because the socket is ready for ``events``."""
        return self._owner.ready(self, events) if self.open else []

    def read(self) -> Iterator[bytes] | None:
        """Return the lines received; None if the launcher has closed the connection.

        Raises OSError if the connection is broken.  Iterating raises MessageError if a line is too long.
        """
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return iter(())
        if not data and self._broken:
            raise self._broken
        return self._lines.feed(data) if data else None

    def write(self, data: bytes) -> None:
        """Send ``data`` now, or once the socket's buffer has room."""
        self._outgoing += data
        self.flush()

    def flush(self) -> None:
        if not self.open:
            return
        if self._outgoing:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except (BlockingIOError, BrokenPipeError):
                pass  # if the pipe is broken, read() reports that the launcher closed it
            except OSError as e:  # the kernel reports an error only once; read() raises it again
                self._broken = e
                self._outgoing.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._socket, events, self)

    def silence(self) -> Silence:
        if self._local or not self.open:
            return Silence(0.0, False)
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        backoff = info[4]  # tcpi_backoff
        (unacknowledged,) = struct.unpack_from("=I", info, 24)  # tcpi_unacked
        seconds = int.from_bytes(info[56:60], sys.byteorder) / 1000  # tcpi_last_ack_recv
        return Silence(seconds, unacknowledged > 0 and backoff >= RETRANSMISSIONS)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._selector.unregister(self._socket)
            self._socket.close()
