"""The agent's end of the control channel.  It never blocks, and a job runs without it, too."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from enum import Enum

from cpulaunch import messages
from cpulaunch.messages import (
    FROM_LAUNCHER,
    AgentMessage,
    LauncherMessage,
    Lines,
    MessageError,
    Unknown,
    decode,
    encode,
    proof,
    same,
)

CONNECT_TIMEOUT = 10.0
"""Seconds until a launcher that doesn't answer counts as out of reach."""


class LinkState(Enum):
    """What has become of the connection."""

    CONNECTING = "connecting"
    UP = "up"
    LOST = "was up once: the launcher is gone"
    ABSENT = "never came about"


class Link:
    """A connection to the launcher.

    ``why`` says why it is lost or absent.  While it is connecting, messages wait.
    """

    def __init__(
        self, address: str, token: str, rank: int, selector: selectors.BaseSelector, patience: float
    ) -> None:
        """``patience``: seconds after which a launcher whose host doesn't answer counts as gone."""
        self.state = LinkState.CONNECTING
        self.why = ""
        self.cut_off = False  # lost, as the launcher's host doesn't answer
        self.waiting: list[AgentMessage] = []
        self.last_sent = time.monotonic()
        self._token, self._rank, self._selector = token, rank, selector
        self._salt = os.urandom(16).hex()
        self._lines, self._outgoing = Lines(), bytearray()
        self._looked_at = time.monotonic()
        self._deadline = self._looked_at + CONNECT_TIMEOUT
        self._patience = patience
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)
        try:
            self._socket.connect(self._address)
        except BlockingIOError:
            pass
        except OSError as e:
            self._give_up(e.strerror or str(e))

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
            if not isinstance(message, messages.Beat):
                self.waiting.append(message)
        elif self.state is LinkState.UP:
            self._outgoing += encode(message)
            self.last_sent = time.monotonic()
            self._flush()

    def ready(self, events: int) -> list[LauncherMessage | Unknown]:
        """The socket is ready for ``events``: move bytes, and return what the launcher said."""
        received: list[LauncherMessage | Unknown] = []
        if events & selectors.EVENT_READ:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                data = None
            except OSError as e:
                return self._give_up(e.strerror or str(e))
            if data == b"":
                return self._give_up("connection closed")
            try:
                for line in self._lines.feed(data or b""):
                    received += self._heard(decode(line, FROM_LAUNCHER))
            except MessageError as e:
                return self._give_up(f"not our launcher: {e}")
        if events & selectors.EVENT_WRITE:
            self._flush()
        return received

    def check_time(self) -> None:
        """Give up on a launcher that doesn't answer, or whose host doesn't any more.

        To be called every second or so: if it wasn't, it was us who had no time.
        """
        now = time.monotonic()
        asleep, self._looked_at = now - self._looked_at, now
        if asleep > 2:
            self._deadline += asleep
        if self.state is LinkState.CONNECTING and now > self._deadline:
            self._give_up(f"no answer within {CONNECT_TIMEOUT:.0f} s")
        elif (
            self.state is LinkState.UP
            and self._silence() > 2 / 3 * self._patience
            and not self._host_answers()
        ):
            self.cut_off = True
            self._give_up("its host doesn't answer")

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._selector.unregister(self._socket)
            self._socket.close()

    def _heard(self, message: LauncherMessage | Unknown) -> list[LauncherMessage | Unknown]:
        if self.state is LinkState.UP or isinstance(message, Unknown):
            return [message]
        if isinstance(message, messages.Challenge):
            hello = messages.Hello(
                version=messages.VERSION,
                rank=self._rank,
                salt=self._salt,
                proof=proof(self._token, "agent", message.salt, self._rank),
                at=time.time(),
                pid=os.getpid(),
                host=socket.gethostname(),
            )
            self._outgoing += encode(hello)
            self._flush()
        elif isinstance(message, messages.Welcome):
            if not same(message.proof, proof(self._token, "launcher", self._salt, self._rank)):
                raise MessageError("it does not know the job's token")
            self.state = LinkState.UP
            waiting, self.waiting = self.waiting, []
            for each in waiting:
                self.send(each)
        return []

    def _silence(self) -> float:
        """Seconds since the launcher's host acknowledged anything, be it a beat (``tcp_info``, tcp(7))."""
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
