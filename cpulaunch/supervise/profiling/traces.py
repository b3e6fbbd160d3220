"""Trace a running job: the ranks trace the same steps, and the launcher merges their traces into one file."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import cpulaunch
from cpulaunch import messages
from cpulaunch.model.names import RANKS, Names
from cpulaunch.supervise.job.rank import Rank
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.profiling.request import MAX_RANKS, Sample, first_step, why_untraceable
from cpulaunch.wording import counted

LOOK = 0.5
"""Seconds over which the ranks' rates of steps are measured."""

ANSWER_WITHIN = 5.0
"""Timeout in seconds for an agent to report its progress or its clock."""

CLOCK_QUESTIONS = 8
"""Number of measurements of an agent's clock.  The one with the shortest round trip counts."""

SEND_WITHIN = 60.0
"""Timeout in seconds for one piece of a trace, and at the end of the job for all traces."""

SAY_WITHIN = 2.0
"""Seconds at the end of the job in which an aborted trace must report to its observer."""

ALIVE = 10.0
"""Seconds between two messages that tell the observer that the trace is still running."""

MERGE = os.path.join(os.path.dirname(cpulaunch.__file__), "trace", "run_merge.py")
"""The program that merges traces, which may take seconds and much memory."""

Say = Callable[[str], Awaitable[None]]


class Profile(NamedTuple):
    """Result of a trace.

    ``file`` is the name of the trace in the job's directory, ``text`` its summary, and ``brief`` the lines of
    the summary before its tables.  If there is no trace, ``error`` says why.
    """

    file: str
    brief: list[str]
    text: str
    error: str


class _Kept(NamedTuple):
    """A rank's trace, as passed to the merging process.

    ``clock`` is the offset to add to the rank's clock to get the launcher's, and ``uncertain`` the maximum
    error of the offset, both in seconds.
    """

    rank: int
    host: str
    file: str
    clock: float
    uncertain: float


class Profiling:
    """Takes the traces of one attempt, one at a time."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        send: Callable[[int, messages.LauncherMessage], None],
        directory: JobDirectory,
        names: Names = RANKS,
    ) -> None:
        """``send`` sends a message to a rank; ``names`` has the words for ranks."""
        self._ranks, self._send, self._directory, self._names = ranks, send, directory, names
        self._requests = 0
        # Messages of the ranks being traced; None once a connection has ended.
        self._inboxes: dict[int, asyncio.Queue[messages.AgentMessage | None]] = {}
        self._window: messages.Trace | None = None  # sent to each rank once it has started
        self._task: asyncio.Task[None] | None = None

    def handle_message(self, rank: int, message: object) -> None:
        """Handle a message from a rank's agent, if it is about traces."""
        if isinstance(message, messages.Started) and self._window and rank in self._inboxes:
            self._send(rank, self._window)
        wanted = (messages.Beat, messages.Time, messages.Tracing, messages.Traced, messages.TracePiece)
        if isinstance(message, wanted) and (inbox := self._inboxes.get(rank)):
            inbox.put_nowait(message)

    def handle_disconnection(self, rank: int) -> None:
        if inbox := self._inboxes.get(rank):
            inbox.put_nowait(None)

    async def trace(self, steps: int, ranks: Collection[int], say: Say) -> Profile:
        """Trace the next ``steps`` of these ranks, or of all ranks if ``ranks`` is empty.

        ``ranks`` are the numbers that users give; instances may start at another number than 0.  ``say`` is
        called with lines about the progress, or with an empty line if there is no news.
        """
        wanted = sorted({number - self._names.first for number in ranks}) or [r.rank for r in self._ranks]
        if self._inboxes:
            of = f": steps {window.first} to {window.last}, by --profile" if (window := self._window) else ""
            return _nothing(f"another trace of this job is running{of}")
        if why := why_untraceable(self._ranks, wanted, steps, self._names):
            return _nothing(why)
        self._open(wanted)
        try:
            before = await self._samples(wanted)
            await asyncio.sleep(LOOK)
            after = await self._samples(wanted)
            if why := why_untraceable(self._ranks, wanted, steps, self._names, current=True):
                return _nothing(why)
            first = first_step(before, after)
            last = first + steps - 1
            await say(f"tracing steps {first} to {last} of {counted(len(wanted), self._names.noun)} …")
            window = self._new_window(first, last)
            for rank in wanted:
                self._send(rank, window)
            return await self._receive(window, wanted, say)
        finally:
            self._inboxes = {}

    def from_start(self, first: int, last: int, done: Callable[[Profile], None]) -> None:
        """Trace the steps ``first`` to ``last`` of the first `MAX_RANKS` ranks, which must not have started.

        Ranks that resume from a later step trace the same number of their next steps.  ``done`` is called
        with the result.
        """
        wanted = [rank.rank for rank in self._ranks[:MAX_RANKS]]
        window = self._window = self._new_window(first, last)
        self._open(wanted)

        async def receive() -> None:
            async def say(line: str) -> None: ...

            try:
                done(await self._receive(window, wanted, say))
            finally:
                self._inboxes, self._window = {}, None

        self._task = asyncio.get_running_loop().create_task(receive())

    async def finish(self, *, failed: bool) -> None:
        """Handle the end of the job: receive the remaining traces, unless the job has ``failed``."""
        if not failed:
            await self._over(SEND_WITHIN)
        for rank in tuple(self._inboxes):
            self._send(rank, messages.Trace(self._requests, 0, 0))
            self.handle_disconnection(rank)
        await self._over(SAY_WITHIN)
        if self._task:
            self._task.cancel()

    async def _over(self, within: float) -> None:
        """Wait until no trace is running, at most ``within`` seconds."""
        deadline = time.monotonic() + within
        while self._inboxes and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    # ---- helpers

    def _open(self, wanted: Collection[int]) -> None:
        self._inboxes = {rank: asyncio.Queue() for rank in wanted}

    def _new_window(self, first: int, last: int) -> messages.Trace:
        self._requests += 1
        return messages.Trace(self._requests, first, last)

    async def _samples(self, wanted: Collection[int]) -> list[Sample]:
        """Ask the ranks for their progress.  For a rank that does not answer, use its last beat."""
        await asyncio.gather(
            *(self._ask(rank, messages.AskProgress(), messages.Beat, ANSWER_WITHIN) for rank in wanted)
        )
        known = [(each, each.beat) for rank in wanted if (each := self._ranks[rank]).beat]
        return [Sample(beat.steps + (each.resumed_from or 0), each.beat_at) for each, beat in known if beat]

    async def _ask(self, rank: int, question: Any, answer: type[Any], within: float) -> Any:
        """Send a request, and return the agent's answer of type ``answer``.

        Returns None if the agent is disconnected, or does not answer within ``within`` seconds.
        """
        self._send(rank, question)
        deadline = time.monotonic() + within
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = await asyncio.wait_for(self._inboxes[rank].get(), left)
            except asyncio.TimeoutError:
                break
            if message is None:
                self._inboxes[rank].put_nowait(None)  # for the next reader
                return None
            if isinstance(message, answer):
                return message
        return None

    async def _receive(self, window: messages.Trace, wanted: Sequence[int], say: Say) -> Profile:
        stem, tasks = "", list[asyncio.Task[_Kept | str]]()
        try:
            # Access the disk in a thread, because it may hang.
            stem = await asyncio.to_thread(self._free_name)
            tasks = [asyncio.create_task(self._rank(window, rank, stem, say)) for rank in wanted]
            while (await asyncio.wait(tasks, timeout=ALIVE))[1]:
                await say("")
            results = {rank: task.result() for rank, task in zip(wanted, tasks, strict=True)}
            kept = [each for each in results.values() if isinstance(each, _Kept)]
            missing = {rank: each for rank, each in results.items() if isinstance(each, str)}
            if not kept:
                return _nothing(_reasons(missing, self._names))
            return await self._merge(kept, missing, stem)
        except BaseException:
            for task in tasks:
                task.cancel()
            for rank in wanted:
                self._send(rank, messages.Trace(window.request, 0, 0))
            raise
        finally:
            await asyncio.to_thread(self._remove, [_part(stem, rank) for rank in wanted])

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._directory.fd)

    def _free_name(self) -> str:
        there = set(os.listdir(self._directory.fd))
        stems = itertools.chain(["trace"], map("trace-{}".format, itertools.count(2)))
        return next(stem for stem in stems if f"{stem}.json.gz" not in there)

    async def _rank(self, window: messages.Trace, rank: int, stem: str, say: Say) -> _Kept | str:
        """Receive one rank's trace.  Returns the reason if there is none."""
        inbox = self._inboxes[rank]
        while (
            not isinstance(message := await inbox.get(), messages.Traced) or message.request != window.request
        ):
            if message is None:
                return "its agent is disconnected"
            if isinstance(message, messages.Tracing) and message.first > window.first:
                at = f"traces from step {message.first} on"
                await say(f"{self._names.one(rank)} was already past step {window.first}, and {at}")
        if message.error:
            return str(message.error)
        clock, uncertain = await self._clock(rank)
        name = _part(stem, rank)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            fd = await asyncio.to_thread(self._directory.open, name, flags, 0o600)
            with os.fdopen(fd, "wb") as file:
                why = await self._pieces(rank, window.request, file.write)
                await asyncio.to_thread(file.flush)
        except OSError as e:
            return f"{self._directory.path / name} can't be written: {e.strerror}"
        return why or _Kept(rank, self._ranks[rank].host, name, clock, uncertain)

    async def _pieces(self, rank: int, request: int, write: Callable[[bytes], object]) -> str:
        """Receive a trace piece by piece; request the next piece after the last one is written.

        Returns the reason if that fails, else an empty string.
        """
        while True:
            piece = await self._ask(rank, messages.SendTrace(request), messages.TracePiece, SEND_WITHIN)
            if piece is None:
                return "its agent disconnected before it had sent everything"
            if piece.error:
                return str(piece.error)
            try:
                data = base64.b64decode(piece.data, validate=True)
            except ValueError:
                return "a piece of the trace is not valid base64"
            await asyncio.to_thread(write, data)
            if piece.last:
                return ""

    async def _clock(self, rank: int) -> tuple[float, float]:
        """Return the offset to add to the rank's clock to get ours, and its maximum error, in seconds."""
        known = self._ranks[rank]
        if known.measured_at is None and not known.clock:
            return 0.0, 0.0  # the rank is on this host
        best = known.clock, known.round_trip / 2
        for number in range(CLOCK_QUESTIONS):
            known.asked_at = asked = time.monotonic()
            answer = await self._ask(rank, messages.AskTime(), messages.Time, ANSWER_WITHIN)
            if answer is None:
                break
            half = (time.monotonic() - asked) / 2
            if not number or half < best[1]:
                best = asked + half - answer.at, half
        return best

    async def _merge(self, kept: Sequence[_Kept], missing: Mapping[int, str], stem: str) -> Profile:
        number = self._names.number
        ranks = [{**each._asdict(), "rank": number(each.rank)} for each in kept]
        lacking = {number(rank): why for rank, why in missing.items()}
        order = {"stem": stem, "noun": self._names.noun, "ranks": ranks, "missing": lacking}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", MERGE, cwd=self._directory.place, pass_fds=(self._directory.fd,),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = await process.communicate(json.dumps(order).encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            (*_, why) = err.decode(errors="replace").strip().splitlines() or [f"exit {process.returncode}"]
            return _nothing(f"the traces can't be merged: {why}")
        summary = json.loads(out)
        return Profile(f"{stem}.json.gz", summary["brief"], summary["text"], "")


def _nothing(why: str) -> Profile:
    return Profile("", [], "", why)


def _reasons(missing: Mapping[int, str], names: Names) -> str:
    """Return the reasons why ranks have no trace, each with its ranks."""
    by_reason: dict[str, list[int]] = {}
    for rank, why in missing.items():
        by_reason.setdefault(why, []).append(rank)
    return "; ".join(f"{names.several(ranks)}: {why}" for why, ranks in by_reason.items())


def _part(stem: str, rank: int) -> str:
    return f"{stem}.rank-{rank}.part"
