"""The launcher's port for agents: one TCP connection per rank."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Protocol

from cpulaunch import messages
from cpulaunch.messages import (
    FROM_AGENT,
    MAX_LINE,
    AgentMessage,
    Hello,
    LauncherMessage,
    Unknown,
    decode,
    encode,
    proof,
    same,
)
from cpulaunch.supervise.start import BACKLOG

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a stranger has to prove that it is one of ours."""

MIN_STRANGERS = 256
"""Connections that may be at that point at once, or twice as many as ranks; more are turned away."""


class Audience(Protocol):
    """Who is told what the agents do."""

    def agent_connected(self, rank: int, hello: Hello) -> None: ...

    def agent_said(self, rank: int, message: AgentMessage | Unknown) -> None: ...

    def agent_disconnected(self, rank: int, error: str) -> None:
        """``error``: what was wrong with what it has sent; empty where it is just gone."""

    async def room(self) -> None:
        """Wait until more may come; awaited before the next message is read."""


class Control:
    """Listens for the agents of one attempt.

    Whoever can't prove to know ``token`` is disconnected, and that is all.  An agent that speaks another
    version of the protocol is, too, but the audience hears of it.
    """

    def __init__(self, token: str, size: int, audience: Audience) -> None:
        self._token, self._size, self._audience = token, size, audience
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._strangers = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, listener: socket.socket) -> None:
        """Serve those who connect to ``listener``."""
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_LINE, backlog=BACKLOG)

    def send(self, rank: int, message: LauncherMessage) -> None:
        """Send to one rank, if it is connected."""
        if writer := self._writers.get(rank):
            writer.write(encode(message))

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        rank, error = None, ""
        try:
            hello = await self._authenticate(reader, writer)
            if hello is not None:
                rank = hello.rank
                self._audience.agent_connected(rank, hello)
                if hello.version == messages.VERSION:
                    await self._listen_to(rank, reader)
        except (OSError, EOFError, asyncio.TimeoutError):
            pass  # gone, or too slow: the same as lost
        except ValueError as e:  # no message, or a line that is longer than the reader's limit
            error = str(e)
        except asyncio.CancelledError:
            pass  # close() has asked for it
        finally:
            self._tasks.discard(task)
            writer.close()
            if rank is not None:
                del self._writers[rank]
                self._audience.agent_disconnected(rank, error)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello | None:
        if self._strangers >= max(MIN_STRANGERS, 2 * self._size):
            return None
        self._strangers += 1
        try:
            salt = os.urandom(16).hex()
            writer.write(encode(messages.Challenge(salt)))
            hello = decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_TIMEOUT), FROM_AGENT)
        finally:
            self._strangers -= 1
        if not isinstance(hello, Hello) or not 0 <= hello.rank < self._size or hello.rank in self._writers:
            return None
        if not same(hello.proof, proof(self._token, "agent", salt, hello.rank)):
            return None
        writer.write(encode(messages.Welcome(proof(self._token, "launcher", hello.salt, hello.rank))))
        self._writers[hello.rank] = writer
        return hello

    async def _listen_to(self, rank: int, reader: asyncio.StreamReader) -> None:
        while (line := await reader.readline()).endswith(b"\n"):  # the end may cut a line off
            self._audience.agent_said(rank, decode(line, FROM_AGENT))
            await self._audience.room()
