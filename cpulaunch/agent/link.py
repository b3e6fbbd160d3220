"""The agent's end of the control channel.  It never blocks, and a job also runs without it."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import time
from enum import Enum
from typing import Any

from cpulaunch import messages
from cpulaunch.messages import FROM_LAUNCHER, AgentMessage, LauncherMessage, Unknown
from cpulaunch.wire import Lines, MessageError, decode, encode, proof, same

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds until the next attempt to connect.  The pause doubles after each failed attempt."""

MORE_PATIENCE = 10
"""An agent waits longer, by this multiple of ``patience``, for a launcher that has sent its challenge."""


class LinkState(Enum):
    """The state of a connection; a lost or absent one is not restored."""

    CONNECTING = "connecting"
    UP = "up"
    LOST = "was up once: the launcher is gone"
    ABSENT = "never came about"


class Link:
    """A connection to the launcher.

    ``why`` says why the connection is lost or absent.  Messages are queued while it is connecting.  If the
    launcher closes the connection before it has accepted the agent, the link connects again.

    A launcher that has sent its challenge is most likely alive, and would take a closed connection for the
    agent's end.  So the link waits much longer for its welcome, but not for ever: another program may have
    taken the launcher's port.
    """

    def __init__(
        self, address: str, token: str, rank: int, selector: selectors.BaseSelector, patience: float
    ) -> None:
        """Connect to ``address``: HOST:PORT, or @NAME for an abstract Unix socket.

        The launcher counts as gone if it has not answered within ``patience`` seconds, or if its host stops
        answering for about that long.
        """
        self.state = LinkState.CONNECTING
        self.why = ""
        self.cut_off = False  # the link is lost because the launcher's host doesn't answer
        self.waiting: list[AgentMessage] = []
        self.last_sent = time.monotonic()
        self._token, self._rank, self._selector = token, rank, selector
        self._salt = os.urandom(16).hex()
        self._lines, self._outgoing = Lines(), bytearray()
        self._looked_at = time.monotonic()
        self._deadline = self._looked_at + patience
        self._patience = patience
        self._greeted = False  # the launcher has sent its challenge, and we our hello
        self._pause, self._again_at = FIRST_PAUSE, 0.0
        self._family, self._address = _parse(address)
        self._socket: socket.socket | None = None
        self._connect()

    @property
    def closed(self) -> bool:
        """Whether no message can be sent or received any more."""
        return self.state in (LinkState.LOST, LinkState.ABSENT)

    @property
    def pending(self) -> int:
        """The approximate number of bytes that wait to be sent."""
        if self.closed:
            return 0
        return len(self._outgoing) + sum(len(m.data) for m in self.waiting if isinstance(m, messages.Output))

    def send(self, message: AgentMessage) -> None:
        """Send a message as soon as the connection is up.  Drop it if the link is lost or absent.

        Of the beats that wait for the connection, only the last is sent.
        """
        if self.state is LinkState.CONNECTING:
            self.last_sent = time.monotonic()
            if isinstance(message, messages.Beat):
                self.waiting = [each for each in self.waiting if not isinstance(each, messages.Beat)]
            self.waiting.append(message)
        elif self.state is LinkState.UP:
            self._outgoing += encode(message)
            if not isinstance(message, messages.Steps):  # Steps don't replace a beat
                self.last_sent = time.monotonic()
            self._flush()

    @property
    def due(self) -> float:
        """The latest time to call ``check_time``, on the monotonic clock."""
        if self.state is LinkState.CONNECTING and self._socket is None:
            return self._again_at
        return time.monotonic() + (1 if self.state is LinkState.CONNECTING else 60)

    def ready(self, events: int) -> list[LauncherMessage | Unknown]:
        """Read and write the socket, which is ready for ``events``, and return the messages received."""
        received: list[LauncherMessage | Unknown] = []
        if self._socket is not None and events & selectors.EVENT_READ:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                data = None
            except OSError as e:
                return self._broken(e)
            if data == b"":
                return self._broken(None)
            try:
                for line in self._lines.feed(data or b""):
                    received += self._heard(decode(line, FROM_LAUNCHER))
            except MessageError as e:
                return self._give_up(f"not our launcher: {e}")
        if events & selectors.EVENT_WRITE:
            self._flush()
        return received

    def check_time(self) -> None:
        """Connect again if it is time, and give up if the launcher or its host doesn't answer.

        Call this when it is ``due``.  If more than 2 s have passed since the last call, this process was
        held up, and the launcher gets that time in addition.
        """
        now = time.monotonic()
        asleep, self._looked_at = now - self._looked_at, now
        if asleep > 2:
            self._deadline += asleep
        if self.closed or (self._socket is None and self.state is LinkState.UP):
            return
        more = MORE_PATIENCE * self._patience if self._greeted else 0
        if self.state is LinkState.CONNECTING and now > self._deadline + more:
            self._give_up(self.why or f"no answer within {self._patience + more:.0f} s")
        elif self._socket is None:
            if now >= self._again_at:
                self._connect()
        elif (
            self.state is LinkState.UP
            and self._silence() > 2 / 3 * self._patience
            and not self._host_answers()
        ):
            self.cut_off = True
            self._give_up("its host doesn't answer")

    def close(self) -> None:
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        self._lines, self._outgoing, self._greeted = Lines(), bytearray(), False
        self._socket = socket.socket(self._family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        if self._family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # We send nothing while we wait for the welcome, so only keepalives show that the host is gone.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            seconds = max(1, int(self._patience / 3))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        self._selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)
        try:
            self._socket.connect(self._address)
        except OSError as e:
            if e.errno != errno.EINPROGRESS:  # a Unix socket's backlog may be full
                self._broken(e)

    def _broken(self, error: OSError | None) -> list[LauncherMessage | Unknown]:
        """Handle a connection that failed with ``error``, or that the launcher closed if it is None."""
        why = (error.strerror or str(error)) if error else "connection closed"
        if self.state is LinkState.UP or isinstance(error, ConnectionRefusedError):  # nobody listens
            return self._give_up(why)
        self.close()
        self.why, self._greeted = why, False
        # Spread the attempts at random: all agents connecting at once may be what keeps the launcher busy.
        self._again_at = time.monotonic() + self._pause * (0.5 + os.urandom(1)[0] / 255)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return []

    def _heard(self, message: LauncherMessage | Unknown) -> list[LauncherMessage | Unknown]:
        if self.state is LinkState.UP or isinstance(message, Unknown):
            return [message]
        if isinstance(message, messages.Challenge):
            if self._greeted:
                raise MessageError("it challenges twice")
            hello = messages.Hello(
                version=messages.VERSION,
                rank=self._rank,
                salt=self._salt,
                proof=proof(self._token, "agent", message.salt, self._rank),
                at=time.monotonic(),
                pid=os.getpid(),
                host=socket.gethostname(),
            )
            self._greeted = True
            self._outgoing += encode(hello)
            self._flush()
        elif isinstance(message, messages.Welcome):
            if not same(message.proof, proof(self._token, "launcher", self._salt, self._rank)):
                raise MessageError("it does not know the job's token")
            self.state, self.why = LinkState.UP, ""
            waiting, self.waiting = self.waiting, []
            for each in waiting:
                self.send(each)
        return []

    def _silence(self) -> float:
        """Seconds since the launcher's host last acknowledged any data (``tcp_info``, tcp(7))."""
        if self._socket is None or self._family == socket.AF_UNIX:  # on the same host
            return 0.0
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        return int.from_bytes(info[56:60], sys.byteorder) / 1000  # tcpi_last_ack_recv

    def _host_answers(self) -> bool:
        """Whether the launcher's host still accepts connections, as it does even for a stopped launcher."""
        try:
            socket.create_connection(self._address, timeout=min(5.0, self._patience / 3)).close()
            return True
        except OSError:
            return False

    def _flush(self) -> None:
        if self._socket is None:
            return
        if self._outgoing:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except (BlockingIOError, OSError):
                pass  # reading will report the broken connection
        self._selector.modify(
            self._socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0), self
        )

    def _give_up(self, why: str) -> list[LauncherMessage | Unknown]:
        self.state = LinkState.LOST if self.state is LinkState.UP else LinkState.ABSENT
        self.why = why
        self.close()
        return []


def _parse(address: str) -> tuple[int, Any]:
    """The socket family and socket address of HOST:PORT or @NAME."""
    if address.startswith("@"):
        return socket.AF_UNIX, "\0" + address[1:]
    host, _, port = address.rpartition(":")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]"), int(port))
