"""The launcher's end of the control channel: one TCP port, one connection per rank."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from cpulaunch.messages import MAX_LINE, Message, decode, encode, proof, same

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a stranger has to prove that it is one of ours."""

MIN_STRANGERS = 256
"""Connections that may be at that point at once, or twice as many as ranks; more are turned away."""

BACKLOG = 4096
"""Connections that may wait to be accepted: all ranks of a big job come at once."""


class Control:
    """Listens for the agents of one job.

    ``heard(rank, message)`` is called for every message of a rank, ``lost(rank)`` when its
    connection has ended; before the next message is read, ``room()`` is awaited.
    Whoever can't prove to know ``token`` is disconnected, and that is all.
    """

    def __init__(
        self,
        token: str,
        size: int,
        heard: Callable[[int, Message], None],
        lost: Callable[[int], None],
        room: Callable[[], Awaitable[None]],
    ) -> None:
        self._token, self._size, self._heard, self._lost, self._room = token, size, heard, lost, room
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._strangers = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, listener: socket.socket) -> None:
        """Serve those who connect to ``listener``."""
        self._server = await asyncio.start_server(
            self._welcome, sock=listener, limit=MAX_LINE, backlog=BACKLOG
        )

    def send(self, rank: int, message: Message) -> None:
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

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        rank = None
        try:
            rank = await self._authenticate(reader, writer)
            if rank is not None:
                await self._listen_to(rank, reader)
        except (OSError, ValueError, EOFError, asyncio.TimeoutError):
            pass  # gone, garbled, too long or too slow: the same as lost
        except asyncio.CancelledError:
            pass  # close() has asked for it
        finally:
            self._tasks.discard(task)
            writer.close()
            if rank is not None:
                del self._writers[rank]
                self._lost(rank)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        if self._strangers >= max(MIN_STRANGERS, 2 * self._size):
            return None
        self._strangers += 1
        try:
            salt = os.urandom(16).hex()
            writer.write(encode({"type": "challenge", "salt": salt}))
            hello = decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_TIMEOUT))
        finally:
            self._strangers -= 1
        rank: Any = hello.get("rank")
        if type(rank) is not int or not 0 <= rank < self._size or rank in self._writers:
            return None
        if not same(hello.get("proof"), proof(self._token, "agent", salt, rank)):
            return None
        writer.write(
            encode({"type": "welcome", "proof": proof(self._token, "launcher", str(hello.get("salt")), rank)})
        )
        self._writers[rank] = writer
        self._heard(rank, hello)
        return rank

    async def _listen_to(self, rank: int, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self._heard(rank, decode(line))
            await self._room()
