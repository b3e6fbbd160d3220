"""The agent's end of the control channel.  It never blocks, and a job also runs without it."""

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

ATTEMPT = 1.0
"""Seconds after which an attempt to connect again is given up, and another one made.  The kernel would wait
longer and longer between its own attempts, and so lengthen an outage."""

MORE_PATIENCE = 10
"""An agent waits longer, by this multiple of ``patience``, for a launcher that has sent its challenge."""

LOOK_AFTER = 1.5
"""Seconds after something was sent until the agent looks whether the launcher's host has acknowledged it."""


class LinkState(Enum):
    """The state of the link.  A lost or absent one is not restored."""

    CONNECTING = "connecting"
    UP = "up"
    LOST = "was up once: the launcher is gone"
    ABSENT = "never came about"


class Link:
    """The way to the launcher, over one connection after the other.

    ``why`` says why the link is lost or absent.  Messages are queued while it is connecting.  If the launcher
    closes the connection before it has accepted the agent, the link connects again.

    Once it is up, a connection that the network breaks is replaced: the link connects again, proves again
    that it knows the token, and both ends send again what the other hasn't acknowledged, so that no message
    is lost or comes twice.  While the launcher's host acknowledges nothing, the link tries that beside the
    old connection.  A connection that the launcher closes means that the launcher is gone, unless the link
    has said hello over another one: the launcher may have moved to that one and closed the old.

    A launcher that has sent its challenge is most likely alive, and would take a closed connection for the
    agent's end.  So the link waits much longer for its welcome, but not for ever: another program may have
    taken the launcher's port.
    """

    def __init__(
        self, address: str, token: str, rank: int, selector: selectors.BaseSelector, patience: float
    ) -> None:
        """Connect to ``address``: HOST:PORT, or @NAME for an abstract Unix socket.

        The launcher counts as gone if it has not answered within ``patience`` seconds, or if its host was
        silent for longer than the launcher bears an agent's silence.
        """
        self.state = LinkState.CONNECTING
        self.why = ""
        self.cut_off = False  # the link is lost because the launcher's host doesn't answer
        self.waiting: list[AgentMessage] = []  # until the first welcome
        self.last_sent = time.monotonic()
        self._token, self._rank, self._selector = token, rank, selector
        self._outbox, self._received, self._acknowledged = Outbox(), 0, 0
        self._looked_at = time.monotonic()
        self._deadline = self._looked_at + patience
        self._patience = patience
        self._pause, self._again_at = FIRST_PAUSE, 0.0
        self._alive_at = self._looked_at  # when the launcher's host was last known to be there
        self._quiet_since: float | None = None  # since when it was found to be quiet
        self._check_at: float | None = None
        self._family, self._address = _parse(address)
        self._current: Connection | None = None  # by which messages are sent
        self._fresh: Connection | None = None  # the attempt to make one
        self._may_have_moved = False  # the launcher may have closed _current because of a later hello
        self._connect()

    @property
    def closed(self) -> bool:
        """Whether no message can be sent or received any more."""
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

        Of the beats that wait for the first connection, only the last is sent.
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
                self._check_at = time.monotonic() + LOOK_AFTER

    @property
    def due(self) -> float:
        """The latest time to call ``check_time``, on the monotonic clock."""
        now = time.monotonic()
        if self._fresh is None and self._current is None:
            return self._again_at
        if self.state is LinkState.CONNECTING or self._fresh:
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
                    return self._broken(connection, None)
                for line in lines:
                    received += self._heard(connection, decode(line, FROM_LAUNCHER))
            except MessageError as e:
                return self._give_up(f"not our launcher: {e}")
            except OSError as e:
                return self._broken(connection, e)
        if events & selectors.EVENT_WRITE:
            connection.flush()
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
            if self._quiet_since is not None:
                self._quiet_since += asleep
        if self.state is LinkState.CONNECTING:
            more = MORE_PATIENCE * self._patience if self._fresh and self._fresh.greeted else 0
            if now > self._deadline + more:
                self._give_up(self.why or f"no answer within {self._patience + more:.0f} s")
            elif self._fresh is None and now >= self._again_at:
                self._connect()
        elif self.state is LinkState.UP and (
            self._current is None or self._fresh or (self._check_at is not None and now >= self._check_at)
        ):
            self._look_for_the_host(now)

    def close(self) -> None:
        for connection in (self._current, self._fresh):
            if connection:
                connection.close()
        self._current = self._fresh = None

    def _look_for_the_host(self, now: float) -> None:
        """Connect again beside a connection whose other end is quiet, or give the launcher's host up."""
        self._check_at = None
        if self._current and not self._is_quiet(self._current):
            self._alive_at, self._quiet_since = now, None
            if self._fresh and not self._fresh.greeted:
                self._fresh.close()
                self._fresh = None
            if self._fresh or self._current.unsent:
                self._check_at = now + LOOK_AFTER
            return
        if self._quiet_since is None:
            self._quiet_since, self._pause, self._again_at = now, FIRST_PAUSE, now
        for each in (self._current, self._fresh):
            if each and (each is self._current or each.connected):
                self._alive_at = max(self._alive_at, now - each.quiet().seconds)
        # The launcher bears as long a silence: see ``State.longest_silence``.
        limit = self._patience * (1 + 1 / BEATS_PER_TIMEOUT)
        if now > self._alive_at + limit and now > self._quiet_since + 2 * ATTEMPT:
            self.cut_off = True
            self._give_up("its host doesn't answer")
            return
        self._check_at = now + ATTEMPT / 2
        if self._fresh and not self._fresh.connected and now > self._fresh.began + ATTEMPT:
            self._fresh.close()
            self._fresh = None
        if self._fresh is None and now >= self._again_at:
            self._connect()

    def _is_quiet(self, connection: Connection) -> bool:
        quiet = connection.quiet()
        return quiet.unacknowledged or quiet.seconds > 2 / 3 * self._patience

    def _connect(self) -> None:
        try:
            self._fresh = Connection(self._family, self._address, self._selector, self, self._patience)
        except OSError as e:  # a Unix socket's backlog may be full, or there is no way to the host
            self._broken(None, e)

    def _broken(
        self, connection: Connection | None, error: OSError | None
    ) -> list[LauncherMessage | Unknown]:
        """Handle a connection that failed with ``error``, or that the launcher closed if it is None.

        ``connection`` is None if it could not be made.
        """
        why = (error.strerror or str(error)) if error else "connection closed"
        # Nothing breaks a Unix socket by itself.
        lasts = (error is None and not self._may_have_moved) or self._family == socket.AF_UNIX
        if connection is not None and connection is self._current and not lasts:
            now = time.monotonic()
            self._alive_at = max(self._alive_at, now - connection.quiet().seconds)
            connection.close()
            self._current = None
            self._look_for_the_host(now)
            return []
        if isinstance(error, ConnectionRefusedError) or (connection and connection is self._current):
            return self._give_up(why)  # nobody listens, or the launcher has closed the connection
        if connection:
            connection.close()
        self._fresh = None
        if self.state is LinkState.CONNECTING:
            self.why = why
        # Spread the attempts at random: all agents connecting at once may be what keeps the launcher busy.
        self._again_at = time.monotonic() + self._pause * (0.5 + os.urandom(1)[0] / 255)
        self._pause = min(2 * self._pause, LONGEST_PAUSE if self.state is LinkState.CONNECTING else ATTEMPT)
        return []

    def _heard(
        self, connection: Connection, message: LauncherMessage | Unknown
    ) -> list[LauncherMessage | Unknown]:
        if isinstance(message, messages.LauncherReceipt):
            self._outbox.acknowledged(message.total)
            if connection is self._fresh and connection.welcome:
                self._replace_by(connection)
        elif connection is self._current:
            self._received += 1
            return [message]
        elif isinstance(message, messages.Challenge):
            self._challenged(connection, message)
        elif isinstance(message, messages.Welcome):
            if not same(message.proof, proof(self._token, "launcher", connection.salt, self._rank)):
                raise MessageError("it does not know the job's token")
            connection.welcome = True
            if self.state is LinkState.CONNECTING:
                self._is_up(connection)
        return []

    def _challenged(self, connection: Connection, challenge: messages.Challenge) -> None:
        if connection.greeted:
            raise MessageError("it challenges twice")
        if self._current and not self._is_quiet(self._current):
            self._look_for_the_host(time.monotonic())  # the old connection works again
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

    def _is_up(self, connection: Connection) -> None:
        self.state, self.why = LinkState.UP, ""
        self._current, self._fresh = connection, None
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            self.send(each)

    def _replace_by(self, connection: Connection) -> None:
        """Go on by a new connection.  The launcher has said how many of our messages it has."""
        if self._current:
            self._current.close()
        self._current, self._fresh, self._may_have_moved = connection, None, False
        self._quiet_since, self._alive_at = None, time.monotonic()
        self._pause = FIRST_PAUSE
        self._check_at = self._alive_at + LOOK_AFTER
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
