"""The agent's end of the control channel.  It never blocks, and a job runs without it, too."""

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
"""Seconds until the next try to connect: it doubles with each that has failed."""

MORE_PATIENCE = 10
"""How many times its patience an agent waits for a launcher that has challenged it, and then says nothing."""


class LinkState(Enum):
    """What has become of the connection."""

    CONNECTING = "connecting"
    UP = "up"
    LOST = "was up once: the launcher is gone"
    ABSENT = "never came about"


class Link:
    """A connection to the launcher.

    ``why`` says why it is lost or absent.  While it is connecting, messages wait.  A launcher that has no
    time to answer, or hangs up before it has, is tried again.  One that has answered is most likely there,
    and would take a hang-up for our end, so it has much more time for the rest; but it may be somebody else
    who has taken its port, so it doesn't have for ever.
    """

    def __init__(
        self, address: str, token: str, rank: int, selector: selectors.BaseSelector, patience: float
    ) -> None:
        """``address`` is HOST:PORT, or @NAME of a Unix socket.  ``patience``: seconds after which a launcher
        that has never answered, or whose host doesn't answer any more, counts as gone.
        """
        self.state = LinkState.CONNECTING
        self.why = ""
        self.cut_off = False  # lost, as the launcher's host doesn't answer
        self.waiting: list[AgentMessage] = []
        self.last_sent = time.monotonic()
        self._token, self._rank, self._selector = token, rank, selector
        self._salt = os.urandom(16).hex()
        self._lines, self._outgoing = Lines(), bytearray()
        self._looked_at = time.monotonic()
        self._deadline = self._looked_at + patience
        self._patience = patience
        self._greeted = False  # the launcher has answered, and has our hello
        self._pause, self._again_at = FIRST_PAUSE, 0.0
        self._family, self._address = _parse(address)
        self._socket: socket.socket | None = None
        self._connect()

    @property
    def closed(self) -> bool:
        """Whether nothing can be said or heard any more."""
        return self.state in (LinkState.LOST, LinkState.ABSENT)

    @property
    def pending(self) -> int:
        """Bytes that wait to be sent, roughly."""
        if self.closed:
            return 0
        return len(self._outgoing) + sum(len(m.data) for m in self.waiting if isinstance(m, messages.Output))

    def send(self, message: AgentMessage) -> None:
        """Send, now or when the connection stands.  Dropped where there is none (any more)."""
        if self.state is LinkState.CONNECTING:
            self.last_sent = time.monotonic()
            if not isinstance(message, (messages.Beat, messages.Steps)):
                self.waiting.append(message)
        elif self.state is LinkState.UP:
            self._outgoing += encode(message)
            if not isinstance(message, messages.Steps):  # which says less than a beat
                self.last_sent = time.monotonic()
            self._flush()

    @property
    def due(self) -> float:
        """When ``check_time`` is due at the latest, on the monotonic clock."""
        if self.state is LinkState.CONNECTING and self._socket is None:
            return self._again_at
        return time.monotonic() + (1 if self.state is LinkState.CONNECTING else 60)

    def ready(self, events: int) -> list[LauncherMessage | Unknown]:
        """The socket is ready for ``events``: move bytes, and return what the launcher said."""
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
        """Try again to connect; give up on a launcher that doesn't answer, or whose host doesn't any more.

        To be called when it is ``due``: if it wasn't, it was us who had no time.
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
            # While we wait to be welcome we say nothing, and would never hear that the host is gone.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            seconds = max(1, int(self._patience / 3))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        self._selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)
        try:
            self._socket.connect(self._address)
        except OSError as e:
            if e.errno != errno.EINPROGRESS:  # of a Unix socket, too many wait to be accepted
                self._broken(e)

    def _broken(self, error: OSError | None) -> list[LauncherMessage | Unknown]:
        """The connection has come to an end, or didn't come about, by ``error`` or the launcher's will."""
        why = (error.strerror or str(error)) if error else "connection closed"
        if self.state is LinkState.UP or isinstance(error, ConnectionRefusedError):  # nobody listens
            return self._give_up(why)
        self.close()
        self.why, self._greeted = why, False
        # Not all at the same time, as what has kept the launcher busy may be all of us.
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
        """Seconds since the launcher's host acknowledged anything, be it a beat (``tcp_info``, tcp(7))."""
        if self._socket is None or self._family == socket.AF_UNIX:  # of the same host
            return 0.0
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        return int.from_bytes(info[56:60], sys.byteorder) / 1000  # tcpi_last_ack_recv

    def _host_answers(self) -> bool:
        """Whether the launcher's host still takes connections, as it does for one that was stopped."""
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
                pass  # a broken connection shows when it is read
        self._selector.modify(
            self._socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0), self
        )

    def _give_up(self, why: str) -> list[LauncherMessage | Unknown]:
        self.state = LinkState.LOST if self.state is LinkState.UP else LinkState.ABSENT
        self.why = why
        self.close()
        return []


def _parse(address: str) -> tuple[int, Any]:
    """The family and the address of a socket to connect to."""
    if address.startswith("@"):
        return socket.AF_UNIX, "\0" + address[1:]
    host, _, port = address.rpartition(":")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]"), int(port))
