"""The launcher's end of the control channel: one connection for each rank's agent, and strangers.

A stranger is a connection that has not been authenticated yet.  This module uses sockets, not asyncio's
streams: thousands of agents cost less, and a stranger can use no more memory than one short line.
"""

from __future__ import annotations

import asyncio
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
from cpulaunch.wire import MAX_LINE, Lines, MessageError, Outbox, decode, encode, proof, same

HANDSHAKE_TIMEOUT = 10.0
"""Seconds within which a stranger has to authenticate."""

MAX_HELLO = 1 << 12
"""Maximum bytes of a stranger's line; a stranger that sends a longer one is refused."""

MAX_READ = 1 << 18
"""Maximum bytes per read from an agent."""

MAX_NAMED = 4
"""Maximum number of refused addresses that are named to the user."""

BACK_WITHIN = 5.0
"""Seconds that an agent has to connect again after the network has broken its connection."""

RECEIPT_AFTER = 1 << 16
"""Bytes of messages after which an agent gets a receipt; each beat also gets one."""

ACCEPTED_AT_ONCE = 64
"""Maximum number of connections accepted before the existing ones are served again."""

ACCEPT_AGAIN = 0.2
"""Seconds to wait before accepting again after running out of descriptors or memory."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Audience(Protocol):
    """Receiver of the agents' messages."""

    def agent_connected(self, rank: int, hello: Hello, *, here: bool) -> None:
        """Handle a new agent.  ``here``: it is on this host, and reads the same clocks."""

    def agent_sent(self, rank: int, message: AgentMessage | Unknown) -> None: ...

    def agent_reconnected(self, rank: int) -> None:
        """Handle an agent's new connection after the network has broken the last one."""

    def agent_disconnected(self, rank: int, error: str) -> None:
        """Handle the end of an agent.

        ``error``: what was wrong with the agent's data; empty if the agent has disconnected.
        """

    @property
    def full(self) -> bool:
        """Whether the caller should stop reading until ``room`` returns."""

    async def room(self) -> None:
        """Wait until the caller may read again."""


class Control:
    """Server for the agents of one attempt.

    A stranger that does not prove that it knows ``token`` is disconnected.  An agent with another version of
    the protocol is reported to the audience as connected, and then disconnected.

    If a TCP connection breaks without having been closed by the agent's host, the agent has ``BACK_WITHIN``
    seconds to connect again.
    """

    def __init__(
        self,
        token: str,
        size: int,
        audience: Audience,
        observers: Observers | None = None,
        strangers: int = MAX_STRANGERS,
    ) -> None:
        """``strangers``: maximum number of connections in addition to one for each of ``size`` ranks."""
        self.refused = Refused()
        self._token, self._size, self._audience, self._observers = token, size, audience, observers
        self._limit = size + strangers
        self._agents: dict[int, _Agent] = {}
        self._may_come_back = True
        self._strangers = _Strangers()
        self._paused: list[_Connection] = []
        self._resuming: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    def listen(self, listener: socket.socket) -> None:
        """Serve connections to ``listener`` until ``close``."""
        listener.setblocking(False)
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    def send(self, rank: int, message: LauncherMessage) -> None:
        if agent := self._agents.get(rank):
            agent.send(message)

    def close(self) -> None:
        if self._listener:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        if self._resuming:
            self._resuming.cancel()
        if self._observers:
            self._observers.close()
        for each in (*self._agents.values(), *self._strangers):
            each.close()

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
                continue  # the peer has disconnected, or a stranger was evicted: try again
            self._receive(accepted)

    def _accept_again(self) -> None:
        if self._listener and self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _receive(self, accepted: socket.socket) -> None:
        try:
            stranger = _Connection(accepted, self._loop, self)
        except OSError as e:  # the peer has disconnected, or is another user
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

    def handle_timeout(self, stranger: _Connection) -> None:
        self.refused.add(stranger.address)
        self.drop(stranger)

    def handle_first_line(self, stranger: _Connection, line: bytes) -> None:
        """Handle a stranger's first line, which makes it an agent or an observer, or ends the connection."""
        self._strangers.remove(stranger)
        if self._observers and (observer := self._observers.authenticate(line, stranger.salt)):
            self._observers.serve(stranger.detach(), observer)
            return
        try:
            hello = decode(line, FROM_AGENT)
        except MessageError:
            hello = None
        if (
            not isinstance(hello, Hello)
            or not 0 <= hello.rank < self._size
            or not same(hello.proof, proof(self._token, "agent", stranger.salt, hello.rank))
            or ((known := self._agents.get(hello.rank)) and not known.is_of(hello))
        ):
            self.refused.add(stranger.address)
            stranger.close()
            return
        stranger.write(encode(messages.Welcome(proof(self._token, "launcher", hello.salt, hello.rank))))
        stranger.accept_as_agent(hello.rank)
        if known:
            known.reconnect(stranger)
            self._audience.agent_reconnected(hello.rank)
            return
        self._agents[hello.rank] = agent = _Agent(hello, stranger)
        agent.write_receipt()
        self._audience.agent_connected(hello.rank, hello, here=stranger.here)
        if hello.version != messages.VERSION:
            self.drop(stranger)

    # ---- agents

    def handle_line(self, rank: int, line: bytes) -> None:
        """Handle a line from an agent.  Raises MessageError."""
        agent, message = self._agents[rank], decode(line, FROM_AGENT)
        if isinstance(message, messages.Receipt):
            agent.handle_receipt(message.total)
            return
        agent.count_message(len(line))
        self._audience.agent_sent(rank, message)
        if isinstance(message, messages.Beat) or agent.unconfirmed > RECEIPT_AFTER:
            agent.write_receipt()

    def handle_break(self, connection: _Connection) -> None:
        """Close a connection that the network has broken.  Its agent may connect again."""
        agent = self._agents.get(connection.rank) if connection.rank is not None else None
        if agent is None or agent.connection is not connection or connection.local or not self._may_come_back:
            self.drop(connection)
            return
        connection.close()
        agent.wait_for_reconnection(self._loop.call_later(BACK_WITHIN, self._remove, agent))

    def expect_nobody_back(self) -> None:
        """Remove agents whose connection is broken, because the MPI or Slurm has ended them."""
        self._may_come_back = False
        for agent in [each for each in self._agents.values() if each.connection is None]:
            agent.close()
            self._remove(agent)

    def drop(self, connection: _Connection, error: str = "") -> None:
        """Close a connection.  ``error`` says what was wrong with its data."""
        connection.close()
        if connection.rank is None:
            self._strangers.remove(connection)
            if error:
                self.refused.add(connection.address)
        elif (agent := self._agents.get(connection.rank)) and agent.connection is connection:
            self._remove(agent, error)

    def _remove(self, agent: _Agent, error: str = "") -> None:
        del self._agents[agent.rank]
        self._audience.agent_disconnected(agent.rank, error)

    def pause_if_full(self, connection: _Connection) -> None:
        """Stop reading from an agent while the audience is full."""
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


class _Agent:
    """An agent, which may use several connections one after the other.

    ``connection`` is None while the agent is disconnected.  ``unconfirmed`` is the size of its messages, in
    bytes, since the last receipt.
    """

    def __init__(self, hello: Hello, connection: _Connection) -> None:
        self.rank = hello.rank
        self.connection: _Connection | None = connection
        self.unconfirmed = 0
        self._process = hello.host, hello.pid
        self._outbox, self._received = Outbox(), 0
        self._catches_up = False  # it has connected again, and its receipt hasn't arrived yet
        self._gone: asyncio.TimerHandle | None = None

    def is_of(self, hello: Hello) -> bool:
        return self._process == (hello.host, hello.pid)

    def send(self, message: LauncherMessage) -> None:
        line = self._outbox.add(encode(message))
        if self.connection and not self._catches_up:
            self.connection.write(line)

    def count_message(self, size: int) -> None:
        self._received += 1
        self.unconfirmed += size

    def write_receipt(self) -> None:
        self.unconfirmed = 0
        if self.connection:
            self.connection.write(encode(messages.LauncherReceipt(self._received)))

    def handle_receipt(self, count: int) -> None:
        """Handle the agent's receipt for ``count`` messages.  Raises MessageError."""
        self._outbox.acknowledged(count)
        if self._catches_up and self.connection:
            self._catches_up = False
            self.connection.write(self._outbox.rest())

    def wait_for_reconnection(self, gone: asyncio.TimerHandle) -> None:
        """Wait for the agent's next connection, until the timer ``gone`` fires."""
        self.connection, self._gone = None, gone

    def reconnect(self, connection: _Connection) -> None:
        self.close()
        self.connection, self._catches_up = connection, True
        self.write_receipt()

    def close(self) -> None:
        if self.connection:
            self.connection.close()
        if self._gone:
            self._gone.cancel()


class Refused:
    """Count and addresses of connections that were closed because they did not authenticate."""

    def __init__(self) -> None:
        self._count = 0
        self._from: dict[str, None] = {}

    def add(self, address: str) -> None:
        self._count += 1
        if len(self._from) <= MAX_NAMED:
            self._from[address] = None

    def __str__(self) -> str:
        """Return a line for the user; empty if there was no such connection."""
        if not self._count:
            return ""
        many = "connections were" if self._count > 1 else "connection was"
        where = ", ".join([*self._from][:MAX_NAMED]) + (", …" if len(self._from) > MAX_NAMED else "")
        return f"{self._count} {many} refused: no proof of the job's token (from {where})"


class _Strangers:
    """Connections that have not been authenticated yet, by origin."""

    def __init__(self) -> None:
        self._by_origin: dict[bytes, dict[_Connection, None]] = {}  # in order of arrival

    def __len__(self) -> int:
        return sum(map(len, self._by_origin.values()))

    def __iter__(self) -> Iterator[_Connection]:
        return iter([each for group in self._by_origin.values() for each in group])

    def add(self, connection: _Connection) -> None:
        self._by_origin.setdefault(connection.origin, {})[connection] = None

    def remove(self, connection: _Connection) -> None:
        group = self._by_origin.get(connection.origin, {})
        if connection in group:
            del group[connection]
            if not group:
                del self._by_origin[connection.origin]

    def evict(self) -> _Connection | None:
        """Close and return the oldest connection of the origin with the most connections, if any.

        So an origin that opens many connections can't displace those of other origins.
        """
        if not self._by_origin:
            return None
        most = max(self._by_origin, key=lambda origin: len(self._by_origin[origin]))
        longest = next(iter(self._by_origin[most]))
        longest.close()
        self.remove(longest)
        return longest


class _Connection:
    """A connection of an agent or of a stranger.

    A stranger may send one line, of at most ``MAX_HELLO`` bytes.

    ``origin`` is the peer's network, ``address`` its address as text, and ``here`` whether it is this host.
    ``local``: the connection is a Unix socket, which no network can break.
    """

    def __init__(self, connected: socket.socket, loop: asyncio.AbstractEventLoop, control: Control) -> None:
        """Send the challenge.  Raises OSError if the peer has disconnected, or is another local user."""
        self.rank: int | None = None
        self.salt = os.urandom(16).hex()
        self.closed = False
        self.origin, self.here, self.address = _origin(connected)
        self.local = connected.family == socket.AF_UNIX
        self._socket, self._loop, self._control = connected, loop, control
        self._lines = Lines(MAX_HELLO)
        self._outgoing = b""
        self._blocked = self._is_broken = False
        connected.setblocking(False)
        if not self.local:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.send(encode(messages.Challenge(self.salt)))
        self._fd = connected.fileno()
        self._timeout: asyncio.TimerHandle | None = loop.call_later(
            HANDSHAKE_TIMEOUT, control.handle_timeout, self
        )
        loop.add_reader(self._fd, self._readable)

    def accept_as_agent(self, rank: int) -> None:
        """Accept the peer as the agent of a rank, which may send longer lines."""
        self.rank = rank
        self._lines.limit = MAX_LINE
        assert self._timeout
        self._timeout.cancel()
        self._timeout = None

    def write(self, data: bytes) -> None:
        """Send ``data``, buffered until the peer takes it."""
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
        """Stop serving the socket and return it."""
        self.closed = True
        if self._timeout:
            self._timeout.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        return self._socket

    def _readable(self) -> None:
        try:
            data = self._socket.recv(MAX_HELLO if self.rank is None else MAX_READ)
        except BlockingIOError:
            return
        except OSError:
            self._control.handle_break(self)
            return
        try:
            for line in self._lines.feed(data):
                if self.rank is None:
                    self._control.handle_first_line(self, line)
                else:
                    self._control.handle_line(self.rank, line)
                if self.closed:
                    return
        except MessageError as e:
            self._control.drop(self, str(e))
            return
        if not data:
            (self._control.handle_break if self._is_broken else self._control.drop)(self)
        elif self.rank is not None:
            self._control.pause_if_full(self)

    def _flush(self) -> None:
        try:
            self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except (BlockingIOError, BrokenPipeError):
            pass  # if the pipe is broken, the next read finds the end of the connection
        except OSError:  # the kernel reports an error only once; the next read finds an end without an error
            self._is_broken, self._outgoing = True, b""
        blocked, self._blocked = self._blocked, bool(self._outgoing)
        if self._blocked and not blocked:
            self._loop.add_writer(self._fd, self._flush)
        elif blocked and not self._blocked:
            self._loop.remove_writer(self._fd)


def _origin(connected: socket.socket) -> tuple[bytes, bool, str]:
    """Return the origin of a connection, whether it comes from this host, and its address as text.

    The origin is the IPv4 address, the /64 network of an IPv6 address, or empty for a Unix socket.  Raises
    PermissionError if a Unix socket belongs to another user.
    """
    if connected.family == socket.AF_UNIX:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.geteuid():
            raise PermissionError
        return b"", True, "this machine"
    peer, own = connected.getpeername()[0], connected.getsockname()[0]
    if connected.family == socket.AF_INET6:
        # A host can usually use all addresses of its /64 network.
        return socket.inet_pton(socket.AF_INET6, peer.partition("%")[0])[:8], peer == own, peer
    return socket.inet_aton(peer), peer == own, peer
