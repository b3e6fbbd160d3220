"""The agent's end of the control channel.  It never blocks.  Jobs also run without it."""

from __future__ import annotations

import os
import selectors
import socket
import time
from enum import Enum
from typing import Any

from cpulaunch import messages
from cpulaunch.agent.connection import Connection
from cpulaunch.messages import BEATS_PER_TIMEOUT, FROM_LAUNCHER, AgentMessage, LauncherMessage, Unknown
from cpulaunch.wire import MessageError, Outbox, decode, encode, proof, same

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds until the next attempt to connect.  The pause doubles after each failed attempt."""

ATTEMPT_TIMEOUT = 1.0
"""Seconds after which an attempt to reconnect is replaced by a new one.  The kernel's own retries would
become ever rarer, and so lengthen an outage."""

GREETED_PATIENCE = 10
"""Multiple of ``patience`` that the agent waits in addition once the launcher has sent its challenge."""

CHECK_AFTER = 1.5
"""Seconds after sending a message until the agent checks that the launcher's host has acknowledged it."""


class LinkState(Enum):
    """The state of a link.  The final states are LOST, if it was UP before, and ABSENT."""

    CONNECTING = "connecting"
    UP = "up"
    LOST = "lost"
    ABSENT = "absent"


class Link:
    """The agent's link to the launcher.  It survives the loss of a connection.

    Messages are queued until the launcher accepts the agent.  If the launcher closes the connection before
    that, the link connects again.  ``why`` says why the link is lost or absent.

    When the network breaks a connection, the link reconnects and authenticates again.  Then both ends resend
    all unacknowledged messages, so that each message arrives exactly once.  If the launcher's host is only
    silent, the link keeps the old connection while it tries to make a new one.

    When the launcher closes the connection, the launcher is gone.  There is one exception: after a hello over
    a new connection, the launcher may have moved to the new connection and closed the old one.

    A launcher that has sent its challenge is most likely alive, and would treat a closed connection as the
    agent's end.  Therefore the link waits much longer for the welcome.  This wait is limited too, as another
    program may have taken the launcher's port.
    """

    def __init__(
        self, address: str, token: str, rank: int, selector: selectors.BaseSelector, patience: float
    ) -> None:
        """Connect to ``address``: HOST:PORT, or @NAME for an abstract Unix socket.

        The link gives up if the launcher doesn't answer within ``patience`` seconds, or if its host is silent
        for longer than an agent may be silent.
        """
        self.state = LinkState.CONNECTING
        self.why = ""
        self.cut_off = False  # the link is lost because the launcher's host doesn't answer
        self.waiting: list[AgentMessage] = []  # until the first welcome
        self.last_sent = time.monotonic()
        self._token, self._rank, self._selector = token, rank, selector
        self._outbox, self._received, self._acknowledged = Outbox(), 0, 0
        self._checked_at = time.monotonic()
        self._deadline = self._checked_at + patience
        self._patience = patience
        self._pause, self._retry_at = FIRST_PAUSE, 0.0
        self._alive_at = self._checked_at  # when the launcher's host last acknowledged something
        self._silent_since: float | None = None  # when its silence was noticed
        self._check_at: float | None = None
        self._family, self._address = _parse(address)
        self._current: Connection | None = None  # carries the messages
        self._attempt: Connection | None = None  # the next connection, until the launcher accepts it
        self._may_have_moved = False  # the launcher may have closed _current because of a later hello
        self._connect()

    @property
    def closed(self) -> bool:
        """Whether the link is lost or absent."""
        return self.state in (LinkState.LOST, LinkState.ABSENT)

    @property
    def pending(self) -> int:
        """The approximate number of bytes that the launcher has not acknowledged."""
        if self.closed:
            return 0
        waiting = sum(len(m.data) for m in self.waiting if isinstance(m, messages.Output))
        return self._outbox.size + waiting

    def send(self, message: AgentMessage) -> None:
        """Send a message as soon as the connection is up.  Drop it if the link is lost or absent.

        While the link is connecting, a beat replaces the queued one.
        """
        if self.state is LinkState.CONNECTING:
            self.last_sent = time.monotonic()
            if isinstance(message, messages.Beat):
                self.waiting = [each for each in self.waiting if not isinstance(each, messages.Beat)]
            self.waiting.append(message)
        elif self.state is LinkState.UP:
            line = self._outbox.add(encode(message))
            if self._current:
                if isinstance(message, messages.Beat) and self._acknowledged != self._received:
                    line += self._receipt()
                self._current.write(line)
            if not isinstance(message, messages.Steps):  # Steps don't replace a beat
                self.last_sent = time.monotonic()
            if self._check_at is None:
                self._check_at = time.monotonic() + CHECK_AFTER

    @property
    def due(self) -> float:
        """The latest time to call ``check_time``, on the monotonic clock."""
        now = time.monotonic()
        if self._attempt is None and self._current is None:
            return self._retry_at
        if self.state is LinkState.CONNECTING or self._attempt:
            return now + 1
        return now + 60 if self._check_at is None else self._check_at

    def ready(self, connection: Connection, events: int) -> list[LauncherMessage | Unknown]:
        """Read and write a connection that is ready for ``events``, and return the messages received."""
        received: list[LauncherMessage | Unknown] = []
        if events & selectors.EVENT_WRITE:
            connection.connected = True
        if events & selectors.EVENT_READ:
            try:
                lines = connection.read()
                if lines is None:
                    return self._handle_failure(connection, None)
                for line in lines:
                    received += self._handle(connection, decode(line, FROM_LAUNCHER))
            except MessageError as e:
                return self._give_up(f"not our launcher: {e}")
            except OSError as e:
                return self._handle_failure(connection, e)
        if events & selectors.EVENT_WRITE:
            connection.flush()
        return received

    def check_time(self) -> None:
        """Reconnect if it is time to, and give up if the launcher or its host doesn't answer.

        Call this when it is ``due``.  If more than 2 s have passed since the last call, this process itself
        was stopped or starved, so the time is added to the launcher's deadline.
        """
        now = time.monotonic()
        asleep, self._checked_at = now - self._checked_at, now
        if asleep > 2:
            self._deadline += asleep
            if self._silent_since is not None:
                self._silent_since += asleep
        if self.state is LinkState.CONNECTING:
            extra = GREETED_PATIENCE * self._patience if self._attempt and self._attempt.greeted else 0
            if now > self._deadline + extra:
                self._give_up(self.why or f"no answer within {self._patience + extra:.0f} s")
            elif self._attempt is None and now >= self._retry_at:
                self._connect()
        elif self.state is LinkState.UP and (
            self._current is None or self._attempt or (self._check_at is not None and now >= self._check_at)
        ):
            self._check_host(now)

    def close(self) -> None:
        for connection in (self._current, self._attempt):
            if connection:
                connection.close()
        self._current = self._attempt = None

    def _check_host(self, now: float) -> None:
        """Reconnect if the launcher's host is silent, or give up if the silence lasts too long."""
        self._check_at = None
        if self._current and not self._is_silent(self._current):
            self._alive_at, self._silent_since = now, None
            if self._attempt and not self._attempt.greeted:
                self._attempt.close()
                self._attempt = None
            if self._attempt or self._current.unsent:
                self._check_at = now + CHECK_AFTER
            return
        if self._silent_since is None:
            self._silent_since, self._pause, self._retry_at = now, FIRST_PAUSE, now
        for each in (self._current, self._attempt):
            if each and (each is self._current or each.connected):
                self._alive_at = max(self._alive_at, now - each.silence().seconds)
        # The launcher has the same limit for an agent's silence: ``State.longest_silence``.
        limit = self._patience * (1 + 1 / BEATS_PER_TIMEOUT)
        if now > self._alive_at + limit and now > self._silent_since + 2 * ATTEMPT_TIMEOUT:
            self.cut_off = True
            self._give_up("its host doesn't answer")
            return
        self._check_at = now + ATTEMPT_TIMEOUT / 2
        if self._attempt and not self._attempt.connected and now > self._attempt.began + ATTEMPT_TIMEOUT:
            self._attempt.close()
            self._attempt = None
        if self._attempt is None and now >= self._retry_at:
            self._connect()

    def _is_silent(self, connection: Connection) -> bool:
        silence = connection.silence()
        return silence.unacknowledged or silence.seconds > 2 / 3 * self._patience

    def _connect(self) -> None:
        try:
            self._attempt = Connection(self._family, self._address, self._selector, self, self._patience)
        except OSError as e:  # a Unix socket's backlog is full, or there is no route to the host
            self._handle_failure(None, e)

    def _handle_failure(
        self, connection: Connection | None, error: OSError | None
    ) -> list[LauncherMessage | Unknown]:
        """Handle a connection that failed with ``error``; None means that the launcher closed it.

        ``connection`` is None if it could not be created.
        """
        why = (error.strerror or str(error)) if error else "connection closed"
        # A Unix socket fails only if the launcher closes it.
        is_final = (error is None and not self._may_have_moved) or self._family == socket.AF_UNIX
        if connection is not None and connection is self._current and not is_final:
            now = time.monotonic()
            self._alive_at = max(self._alive_at, now - connection.silence().seconds)
            connection.close()
            self._current = None
            self._check_host(now)
            return []
        if isinstance(error, ConnectionRefusedError) or (connection and connection is self._current):
            return self._give_up(why)  # no launcher listens, or it has closed the connection
        if connection:
            connection.close()
        self._attempt = None
        if self.state is LinkState.CONNECTING:
            self.why = why
        # Use a random pause: if all agents connected at the same time, they would overload the launcher.
        self._retry_at = time.monotonic() + self._pause * (0.5 + os.urandom(1)[0] / 255)
        self._pause = min(
            2 * self._pause, LONGEST_PAUSE if self.state is LinkState.CONNECTING else ATTEMPT_TIMEOUT
        )
        return []

    def _handle(
        self, connection: Connection, message: LauncherMessage | Unknown
    ) -> list[LauncherMessage | Unknown]:
        if isinstance(message, messages.LauncherReceipt):
            self._outbox.acknowledged(message.total)
            if connection is self._attempt and connection.welcome:
                self._switch_to(connection)
        elif connection is self._current:
            self._received += 1
            return [message]
        elif isinstance(message, messages.Challenge):
            self._answer_challenge(connection, message)
        elif isinstance(message, messages.Welcome):
            if not same(message.proof, proof(self._token, "launcher", connection.salt, self._rank)):
                raise MessageError("it does not know the job's token")
            connection.welcome = True
            if self.state is LinkState.CONNECTING:
                self._set_up(connection)
        return []

    def _answer_challenge(self, connection: Connection, challenge: messages.Challenge) -> None:
        if connection.greeted:
            raise MessageError("it challenges twice")
        if self._current and not self._is_silent(self._current):
            self._check_host(time.monotonic())  # the old connection works again
            return
        hello = messages.Hello(
            version=messages.VERSION,
            rank=self._rank,
            salt=connection.salt,
            proof=proof(self._token, "agent", challenge.salt, self._rank),
            at=time.monotonic(),
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        connection.greeted = True
        self._may_have_moved = self._current is not None
        connection.write(encode(hello))

    def _set_up(self, connection: Connection) -> None:
        self.state, self.why = LinkState.UP, ""
        self._current, self._attempt = connection, None
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            self.send(each)

    def _switch_to(self, connection: Connection) -> None:
        """Replace the current connection, and resend the messages that the launcher lacks."""
        if self._current:
            self._current.close()
        self._current, self._attempt, self._may_have_moved = connection, None, False
        self._silent_since, self._alive_at = None, time.monotonic()
        self._pause = FIRST_PAUSE
        self._check_at = self._alive_at + CHECK_AFTER
        connection.write(self._receipt() + self._outbox.rest())

    def _receipt(self) -> bytes:
        self._acknowledged = self._received
        return encode(messages.Receipt(self._received))

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
