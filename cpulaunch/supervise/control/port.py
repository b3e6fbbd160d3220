"""The launcher's end of the control channel: one connection per rank's agent, and strangers.

Sockets of our own rather than asyncio's streams: thousands of agents cost less, and a stranger gets no more
memory than the short line that it may say.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import Protocol

from cpulaunch import messages
from cpulaunch.messages import FROM_AGENT, AgentMessage, Hello, LauncherMessage, Unknown
from cpulaunch.supervise.attempts.start import MAX_STRANGERS
from cpulaunch.supervise.control.observers import Observers
from cpulaunch.wire import MAX_LINE, Lines, MessageError, decode, encode, proof, same

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a stranger has to prove that it is one of ours."""

MAX_HELLO = 1 << 12
"""Bytes of the line by which a stranger proves itself; one that says more is none of ours."""

MAX_READ = 1 << 18
"""Bytes that are read at once of what an agent says."""

MAX_NAMED = 4
"""Addresses of strangers that are named at most."""

ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before those who are there already are heard again."""

ACCEPT_AGAIN = 0.2
"""Seconds until we accept again, where there were no descriptors left for it."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Audience(Protocol):
    """Who is told what the agents do."""

    def agent_connected(self, rank: int, hello: Hello, *, here: bool) -> None:
        """``here``: the agent is on this host, and reads the same clocks."""

    def agent_said(self, rank: int, message: AgentMessage | Unknown) -> None: ...

    def agent_disconnected(self, rank: int, error: str) -> None:
        """``error``: what was wrong with what it has sent; empty where it is just gone."""

    @property
    def full(self) -> bool:
        """Whether nothing more should be read, until there is ``room``."""

    async def room(self) -> None:
        """Wait until more may come."""


class Control:
    """Listens for the agents of one attempt.

    Whoever can't prove to know ``token`` is disconnected, and that is all.  An agent that speaks another
    version of the protocol is, too, but the audience hears of it.
    """

    def __init__(
        self,
        token: str,
        size: int,
        audience: Audience,
        observers: Observers | None = None,
        strangers: int = MAX_STRANGERS,
    ) -> None:
        """``strangers``: so many connections may be there besides one for each of ``size`` ranks."""
        self.refused = Refused()
        self._token, self._size, self._audience, self._observers = token, size, audience, observers
        self._limit = size + strangers
        self._agents: dict[int, _Connection] = {}
        self._strangers = _Strangers()
        self._paused: list[_Connection] = []
        self._resuming: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    def listen(self, listener: socket.socket) -> None:
        """Serve those who connect to ``listener``, until ``close``."""
        listener.setblocking(False)
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    def send(self, rank: int, message: LauncherMessage) -> None:
        """Send to one rank, if it is connected."""
        if connection := self._agents.get(rank):
            connection.write(encode(message))

    def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._listener:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        if self._resuming:
            self._resuming.cancel()
        if self._observers:
            self._observers.close()
        for connection in (*self._agents.values(), *self._strangers):
            connection.close()

    # ---- strangers

    def _accept(self) -> None:
        assert self._listener
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in _NO_ROOM and not self._evict():
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(ACCEPT_AGAIN, self._accept_again)
                    return
                continue  # else that one has gone again
            self._receive(accepted)

    def _accept_again(self) -> None:
        if self._listener and self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _receive(self, accepted: socket.socket) -> None:
        try:
            stranger = _Connection(accepted, self._loop, self)
        except OSError as e:  # it has gone, or is another user's
            if isinstance(e, PermissionError):
                self.refused.add("another user of this machine")
            accepted.close()
            return
        self._strangers.add(stranger)
        if len(self._agents) + len(self._strangers) > self._limit:
            self._evict()

    def _evict(self) -> bool:
        evicted = self._strangers.evict()
        if evicted:
            self.refused.add(evicted.address)
        return evicted is not None

    def too_late(self, stranger: _Connection) -> None:
        """It has had its time."""
        self.refused.add(stranger.address)
        self.ended(stranger)

    def greeted(self, stranger: _Connection, line: bytes) -> None:
        """A stranger's first line: it is an agent from now on, or an observer, or hung up on."""
        self._strangers.remove(stranger)
        if self._observers and (observer := self._observers.proven(line, stranger.salt)):
            self._observers.serve(stranger.detach(), observer)
            return
        try:
            hello = decode(line, FROM_AGENT)
        except MessageError:
            hello = None
        if (
            not isinstance(hello, Hello)
            or not 0 <= hello.rank < self._size
            or hello.rank in self._agents
            or not same(hello.proof, proof(self._token, "agent", stranger.salt, hello.rank))
        ):
            self.refused.add(stranger.address)
            stranger.close()
            return
        stranger.write(encode(messages.Welcome(proof(self._token, "launcher", hello.salt, hello.rank))))
        stranger.is_agent(hello.rank)
        self._agents[hello.rank] = stranger
        self._audience.agent_connected(hello.rank, hello, here=stranger.here)
        if hello.version != messages.VERSION:
            self.ended(stranger)

    # ---- agents

    def said(self, rank: int, line: bytes) -> None:
        """A line of an agent.  Raises MessageError."""
        self._audience.agent_said(rank, decode(line, FROM_AGENT))

    def ended(self, connection: _Connection, error: str = "") -> None:
        """A connection has come to its end; ``error`` says what was wrong with what came through it."""
        connection.close()
        if connection.rank is None:
            self._strangers.remove(connection)
            if error:
                self.refused.add(connection.address)
        elif self._agents.get(connection.rank) is connection:
            del self._agents[connection.rank]
            self._audience.agent_disconnected(connection.rank, error)

    def heard(self, connection: _Connection) -> None:
        """All of what an agent has sent so far was said: the next has to wait while there is no room."""
        if self._audience.full and not connection.closed:
            connection.pause()
            self._paused.append(connection)
            if self._resuming is None:
                self._resuming = self._loop.create_task(self._resume())

    async def _resume(self) -> None:
        await self._audience.room()
        self._resuming = None
        paused, self._paused = self._paused, []
        for connection in paused:
            connection.resume()


class Refused:
    """Connections that were hung up on, as they didn't prove to be ours, and where they came from."""

    def __init__(self) -> None:
        self._count = 0
        self._from: dict[str, None] = {}

    def add(self, address: str) -> None:
        self._count += 1
        if len(self._from) <= MAX_NAMED:
            self._from[address] = None

    def __str__(self) -> str:
        """A line for the user; empty where there was none."""
        if not self._count:
            return ""
        many = "connections were" if self._count > 1 else "connection was"
        where = ", ".join([*self._from][:MAX_NAMED]) + (", …" if len(self._from) > MAX_NAMED else "")
        return f"{self._count} {many} hung up on: no proof of the job's token (from {where})"


class _Strangers:
    """Connections that haven't proved themselves, by where they come from."""

    def __init__(self) -> None:
        self._by_origin: dict[bytes, dict[_Connection, None]] = {}  # in the order in which they have come
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[_Connection]:
        return iter([each for group in self._by_origin.values() for each in group])

    def add(self, connection: _Connection) -> None:
        self._by_origin.setdefault(connection.origin, {})[connection] = None
        self._count += 1

    def remove(self, connection: _Connection) -> None:
        group = self._by_origin.get(connection.origin, {})
        if connection in group:
            del group[connection]
            self._count -= 1
            if not group:
                del self._by_origin[connection.origin]

    def evict(self) -> _Connection | None:
        """Hang up on one: where most come from, on the one that has been there longest.

        So many connections of one address cost that address its own, and nobody else theirs.
        """
        if not self._by_origin:
            return None
        most = max(self._by_origin, key=lambda origin: len(self._by_origin[origin]))
        longest = next(iter(self._by_origin[most]))
        longest.close()
        self.remove(longest)
        return longest


class _Connection:
    """A connection of an agent, or of a stranger, who may say one line of ``MAX_HELLO`` bytes.

    ``origin`` is the network that it comes from, ``address`` its address for people, and ``here`` whether it
    is this host's own.
    """

    def __init__(self, connected: socket.socket, loop: asyncio.AbstractEventLoop, control: Control) -> None:
        """Challenge whoever has connected.  OSError where it has gone, or isn't our user's."""
        self.rank: int | None = None
        self.salt = os.urandom(16).hex()
        self.closed = False
        self.origin, self.here, self.address = _origin(connected)
        self._socket, self._loop, self._control = connected, loop, control
        self._lines = Lines(MAX_HELLO)
        self._outgoing = b""
        self._blocked = False
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.send(encode(messages.Challenge(self.salt)))
        self._fd = connected.fileno()
        self._too_late: asyncio.TimerHandle | None = loop.call_later(
            HANDSHAKE_TIMEOUT, control.too_late, self
        )
        loop.add_reader(self._fd, self._readable)

    def is_agent(self, rank: int) -> None:
        """It has proved itself, so it may say more."""
        self.rank = rank
        self._lines.limit = MAX_LINE
        assert self._too_late
        self._too_late.cancel()
        self._too_late = None

    def write(self, data: bytes) -> None:
        """Send, as soon as the other end takes it."""
        if self.closed:
            return
        self._outgoing += data
        self._flush()

    def pause(self) -> None:
        self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        if not self.closed:
            self._loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        if not self.closed:
            self.detach().close()

    def detach(self) -> socket.socket:
        """The socket, which is somebody else's to serve."""
        self.closed = True
        if self._too_late:
            self._too_late.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        return self._socket

    def _readable(self) -> None:
        try:
            data = self._socket.recv(MAX_HELLO if self.rank is None else MAX_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for line in self._lines.feed(data):
                if self.rank is None:
                    self._control.greeted(self, line)
                else:
                    self._control.said(self.rank, line)
                if self.closed:
                    return
        except MessageError as e:
            self._control.ended(self, str(e))
            return
        if not data:
            self._control.ended(self)
        elif self.rank is not None:
            self._control.heard(self)

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # a broken connection shows when it is read
            self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        blocked, self._blocked = self._blocked, bool(self._outgoing)
        if self._blocked and not blocked:
            self._loop.add_writer(self._fd, self._flush)
        elif blocked and not self._blocked:
            self._loop.remove_writer(self._fd)


def _origin(connected: socket.socket) -> tuple[bytes, bool, str]:
    """Where a connection comes from, as far as one neighbour can pretend to be many; whether it is here; and
    its address.

    PermissionError where it is another user's of this machine.
    """
    if connected.family == socket.AF_UNIX:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.geteuid():
            raise PermissionError
        return b"", True, "this machine"
    peer, own = connected.getpeername()[0], connected.getsockname()[0]
    if connected.family == socket.AF_INET6:
        # Whoever has one address of IPv6 mostly has the 2**64 that begin alike.
        return socket.inet_pton(socket.AF_INET6, peer.partition("%")[0])[:8], peer == own, peer
    return socket.inet_aton(peer), peer == own, peer
