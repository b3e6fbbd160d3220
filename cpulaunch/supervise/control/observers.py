"""The launcher's server for observers, such as ``cpulaunch stacks`` and ``cpulaunch jobs``."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from cpulaunch.messages import VERSION, Welcome
from cpulaunch.supervise.control import observer_messages as protocol
from cpulaunch.supervise.job.events import DumpFinished
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.supervise.profiling.traces import Profiling
from cpulaunch.supervise.stalls.inquiry import ANSWER_WITHIN
from cpulaunch.wire import Lines, MessageError, decode, encode, observers_token, proof, same

MAX_OBSERVERS = 8
"""Maximum number of simultaneous observers; further connections are closed."""

MAX_QUESTION = 1 << 12
"""Maximum bytes of a line from an observer."""

PROGRESS_WITHIN, LOOK_EVERY = 0.5, 0.01
"""Seconds to wait for the agents' progress, and between two checks whether all agents have answered."""

PATIENCE = 60.0
"""Timeout in seconds for an observer to ask the next question, or to receive an answer."""


class Observers:
    """Serves observers that have authenticated with the job's token.

    ``status`` returns the job's status.  ``request_dump`` is called when an observer asks for stacks; its
    argument is True for native frames, and the caller passes the result to ``deliver``.
    ``request_progress`` asks the agents of ranks for beats.
    """

    def __init__(
        self,
        token: str,
        ranks: list[Rank],
        status: Callable[[], protocol.Status],
        request_dump: Callable[[bool], None],
        request_progress: Callable[[list[Rank]], None],
        profiling: Profiling | None = None,
    ) -> None:
        """``token`` is the job's token, from which the observers' token is derived."""
        self._profiling = profiling
        self._token = observers_token(token)
        self._ranks, self._status = ranks, status
        self._request_dump, self._request_progress = request_dump, request_progress
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: list[tuple[bool, asyncio.Future[DumpFinished]]] = []

    def authenticate(self, line: bytes, salt: str) -> protocol.Observe | None:
        """Return the ``Observe`` message of a stranger's first line, or None if that is not a valid one."""
        try:
            message = decode(line, protocol.FROM_OBSERVER)
        except MessageError:
            return None
        if not isinstance(message, protocol.Observe):
            return None
        return message if same(message.proof, proof(self._token, protocol.OBSERVER, salt, 0)) else None

    def serve(self, connected: socket.socket, observer: protocol.Observe) -> None:
        """Answer an observer's questions until it disconnects.

        The connection is closed at once if there are ``MAX_OBSERVERS``, or if the observer has another
        version of the protocol.
        """
        if observer.version != VERSION or len(self._tasks) >= MAX_OBSERVERS:
            connected.close()
            return
        own_proof = proof(self._token, protocol.LAUNCHER, observer.salt, 0)
        welcome = encode(Welcome(own_proof), protocol.KINDS)
        task = asyncio.get_running_loop().create_task(self._serve(connected, welcome))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def deliver(self, dumps: DumpFinished) -> None:
        """Pass on the stacks to the observers that wait for them."""
        served = [future for native, future in self._waiting if native <= dumps.native]
        self._waiting = [each for each in self._waiting if each[1] not in served]
        for future in served:
            if not future.done():
                future.set_result(dumps)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _serve(self, connected: socket.socket, welcome: bytes) -> None:
        loop = asyncio.get_running_loop()
        lines = Lines(MAX_QUESTION)
        with connected, contextlib.suppress(OSError, MessageError, asyncio.TimeoutError):
            await self._send(connected, welcome)
            while data := await asyncio.wait_for(loop.sock_recv(connected, MAX_QUESTION), PATIENCE):
                for line in lines.feed(data):
                    await self._answer(connected, decode(line, protocol.FROM_OBSERVER))

    async def _answer(self, connected: socket.socket, question: NamedTuple) -> None:
        if isinstance(question, protocol.AskStatus):
            await self._latest_progress()
            await self._say(connected, self._status())
        elif isinstance(question, protocol.AskStacks):
            future: asyncio.Future[DumpFinished] = asyncio.get_running_loop().create_future()
            self._waiting.append((question.native, future))
            self._request_dump(question.native)
            dumps = await asyncio.wait_for(future, PATIENCE)
            for rank in self._ranks:
                await self._say(connected, _of_rank(rank, dumps))
            await self._say(connected, protocol.StacksEnd())
        elif isinstance(question, protocol.AskProfile) and self._profiling:
            await self._profile(connected, question, self._profiling)
        else:
            raise MessageError("unexpected message")

    async def _latest_progress(self) -> None:
        """Ask all agents for their ranks' progress, and wait at most ``PROGRESS_WITHIN`` seconds.

        Without this, the last beats may be old.
        """
        now = asyncio.get_running_loop().time
        asked = time.monotonic()
        running = [rank for rank in self._ranks if rank.state is RankState.RUNNING]
        self._request_progress(running)
        until = now() + PROGRESS_WITHIN
        while any(rank.beat_at < asked for rank in running) and now() < until:
            await asyncio.sleep(LOOK_EVERY)

    async def _profile(
        self, connected: socket.socket, asked: protocol.AskProfile, profiling: Profiling
    ) -> None:
        """Trace and send the result.  The trace is cancelled if the observer disconnects."""

        async def say(text: str) -> None:
            await self._say(connected, protocol.ProfileProgress(text))

        loop = asyncio.get_running_loop()
        tracing = loop.create_task(profiling.trace(asked.steps, asked.ranks, say))
        gone = loop.create_task(loop.sock_recv(connected, 1))
        try:
            await asyncio.wait({tracing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if tracing.done():
                done = tracing.result()
                await self._say(connected, protocol.Profiled(done.file, done.text, done.error))
        finally:
            for task in (tracing, gone):
                task.cancel()
            await asyncio.gather(tracing, gone, return_exceptions=True)

    async def _say(self, connected: socket.socket, answer: Any) -> None:
        await self._send(connected, encode(answer, protocol.KINDS))

    async def _send(self, connected: socket.socket, data: bytes) -> None:
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(connected, data), PATIENCE)


def _of_rank(rank: Rank, dumps: DumpFinished) -> protocol.RankStacks:
    if dump := dumps.answers.get(rank.rank):
        return protocol.RankStacks(rank.rank, rank.host, dump.processes, dump.error)
    if rank.rank in dumps.silent and rank.state is RankState.RUNNING:
        error = f"its agent has not answered within {ANSWER_WITHIN:g} s"
        return protocol.RankStacks(rank.rank, rank.host, None, error)
    left, not_yet = (rank.status, "") if rank.state.final else ("", rank.status)
    return protocol.RankStacks(rank.rank, rank.host, None, not_yet, left)


def status_of(
    ranks: list[Rank], seconds: float, restarts: int, *, ending: bool, stalled: str = "", stated: str = ""
) -> protocol.Status:
    """Return the status of a job.

    ``seconds`` counts from the start of the job.  ``stalled`` says where the job hangs, and ``stated`` has
    the rates that its programs have printed; both may be empty.
    """
    running = sum(rank.state is RankState.RUNNING for rank in ranks)
    state = "ending" if ending else "stalled" if stalled else "running" if running else "starting"
    first = max((rank for rank in ranks if rank.beat), key=_progress, default=None)
    steps, collectives = _progress(first) if first else (0, 0)
    step_rate, collective_rate = (first.rates if first else None) or (None, None)
    hosts = len({rank.host for rank in ranks})
    rates = step_rate, collective_rate
    return protocol.Status(
        state, hosts, len(ranks), running, seconds, restarts, steps, collectives, *rates, stalled, stated
    )


def _progress(rank: Rank) -> tuple[int, int]:
    """Return the rank's steps, counted through restarts, and its collectives of this attempt."""
    return ((rank.resumed_from or 0) + rank.beat.steps, rank.beat.collectives) if rank.beat else (0, 0)
