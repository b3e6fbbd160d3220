"""Watch a job's ranks, end it, and say how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from cpulaunch.channel import UNREACHED, Message, encode, unpack
from cpulaunch.errors import HostError
from cpulaunch.launch import outcome as kinds
from cpulaunch.launch.control import Control
from cpulaunch.launch.job import Job
from cpulaunch.launch.outcome import Failure, Outcome, RankOutcome
from cpulaunch.launch.output import Output, write_all
from cpulaunch.launch.sweep import sweep
from cpulaunch.plan.plan import Plan

SETTLE = 1.0
"""Seconds in which messages may still arrive from ranks whose starter has ended."""

STARTER_EXIT = 5.0
"""Seconds that a starter has to end by itself after its last rank did."""

HELLO_TIMEOUT = 60.0
"""Seconds after the first rank's hello in which all others must have said theirs."""

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGKILL)
"""What a starter is sent, a second apart: Intel's and Open MPI's want SIGINT twice after a lost link."""


@dataclass
class _Rank:
    """What is known of one rank."""

    rank: int
    host: str
    heard_at: float | None = None
    pid: int | None = None
    cores: str | None = None
    status: str = "not started"
    failure: Message | None = None
    over: bool = False
    goodbye: bool = False
    missed_at: float | None = None


class Watch:
    """One job, from the start of its commands to its outcome."""

    def __init__(
        self,
        plan: Plan,
        job: Job,
        starters: Sequence[subprocess.Popen[bytes]],
        output: Output,
        tell: Callable[[str], None],
    ) -> None:
        self.plan, self.job, self.starters = plan, job, starters
        self.output, self.tell = output, tell
        self.ranks = [_Rank(rank.rank, host.host) for host in plan.hosts for rank in host.ranks]
        self.control = Control(job.token, plan.world_size, self._heard, self._lost)
        self.relays: list[asyncio.Task[None]] = []
        self.changed = asyncio.Event()
        self.started = self.looked_at = time.monotonic()
        self.kind = kinds.OK
        self.exit_code = 0
        self.first: Failure | None = None
        self.ending = False
        self.end_message: Message | None = None
        self.first_hello: float | None = None
        self.spared_ended = False
        self.signals = 0
        self.unreached = False

    async def run(self, listener: socket.socket) -> Outcome:
        """Watch until all ranks have ended.  Returns when no process of the job is left on this host."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as it is under nohup
                loop.add_signal_handler(number, self._interrupted, number)
        loop.add_signal_handler(signal.SIGCHLD, self.changed.set)
        try:
            await self.control.listen(listener)
            for starter in self.starters:
                for pipe, stream in ((starter.stdout, 1), (starter.stderr, 2)):
                    self.relays.append(asyncio.create_task(self._relay(pipe, stream)))
            await self._watch()
        finally:
            await self._end_starters()
            if not all(rank.goodbye for rank in self.ranks):
                sweep(self.job.id)  # a keeper that could say goodbye has left nothing
            await asyncio.wait(self.relays, timeout=SETTLE)
            await self.control.close()
        for rank in self.ranks:
            self.output.finish(rank.rank)
            if not rank.over:
                rank.status = "ended by launcher"
        seconds = time.monotonic() - self.started
        ranks = tuple(RankOutcome(r.rank, r.host, r.pid, r.cores, r.status) for r in self.ranks)
        return Outcome(self.exit_code, self.kind, seconds, self.first, ranks, self.job.restart_count)

    async def _relay(self, source: IO[bytes] | None, stream: int) -> None:
        """Show what mpiexec, ssh and unwatched keepers say; once we end them, only keep it."""
        pipe = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), source)
        while data := await pipe.read(1 << 16):
            self.unreached = self.unreached or UNREACHED.encode() in data
            self.output.keep("starter.log", data)
            if not self.ending:
                write_all(stream, data)

    # ---- watching

    async def _watch(self) -> None:
        quiet_since = None
        while not all(rank.over for rank in self.ranks):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.2 if quiet_since else 1.0)
            self.changed.clear()
            self._look_for_silence()
            self._look_for_the_missing()
            if not self._running():
                quiet_since = quiet_since or time.monotonic()
                if time.monotonic() > quiet_since + SETTLE:
                    break
        missing = [rank for rank in self.ranks if not rank.over]
        if missing and not self.ending:
            self._starter_ended_early(missing)

    def _starter_ended_early(self, missing: list[_Rank]) -> None:
        code = next((s.returncode for s in self.starters if s.returncode), 0)
        code = 128 - code if code < 0 else code
        if self.unreached:
            self.kind, self.exit_code = (kinds.EXIT, code) if code else (kinds.OK, 0)
            for rank in missing:
                rank.status = "not watched"
            return
        rank = missing[0]
        self._failed(
            kinds.START_FAILED,
            HostError.exit_code,
            Failure(
                rank.rank,
                rank.host,
                exit_code=code,
                error=f"{self.plan.mpiexec or 'the keeper'} ended with code {code} "
                f"before {len(missing)} of {len(self.ranks)} ranks had reported",
            ),
        )

    def _look_for_silence(self) -> None:
        """A rank that says nothing for too long is lost; but not if it was us who couldn't listen."""
        timeout = self.plan.setting("watch.heartbeat_timeout")
        asleep, self.looked_at = time.monotonic() - self.looked_at, time.monotonic()
        if asleep > timeout / 2:  # stopped by Ctrl-Z, or by a terminal that took nothing
            for rank in self.ranks:
                rank.heard_at = rank.heard_at and rank.heard_at + asleep
        for rank in self.ranks:
            if not rank.over and rank.heard_at is not None and time.monotonic() > rank.heard_at + timeout:
                rank.over, rank.status = True, "lost"
                self._failed(
                    kinds.NODE_LOST,
                    4,
                    Failure(rank.rank, rank.host, error=f"no sign of life for {timeout} s"),
                )

    def _look_for_the_missing(self) -> None:
        """Ranks that have never said hello, though their keeper has ended, or others did long ago."""
        if self.ending or self.unreached:
            return
        now = time.monotonic()
        first = self.first_hello or now
        for rank in self.ranks:
            if rank.heard_at is not None:
                continue
            gone = self.plan.starter == "local" and self.starters[rank.rank].poll() is not None
            if gone and rank.missed_at is None:
                rank.missed_at = now
            if (rank.missed_at and now > rank.missed_at + SETTLE) or now > first + HELLO_TIMEOUT:
                why = (
                    "its keeper ended before it said hello"
                    if gone
                    else f"no hello within {HELLO_TIMEOUT:.0f} s"
                )
                self._failed(
                    kinds.START_FAILED, HostError.exit_code, Failure(rank.rank, rank.host, error=why)
                )
                rank.over = gone
                return

    def _heard(self, number: int, message: Message) -> None:
        rank = self.ranks[number]
        rank.heard_at = time.monotonic()
        self.changed.set()
        kind = message["type"]
        if kind not in ("output", "beat"):
            self._note_event(number, message)
        if kind == "hello":
            self.first_hello = self.first_hello or time.monotonic()
        if kind == "hello" and self.end_message:
            self.control.send(number, self.end_message)  # a late one: it has missed it
        elif kind == "output":
            self.output.feed(number, message["stream"], unpack(message["data"]))
        elif kind == "started":
            rank.pid, rank.cores, rank.status = message["pid"], message["cores"], "running"
            for note in message["notes"]:
                self.tell(f"{rank.host}: {note}")
        elif kind == "note":
            self.tell(f"{rank.host}: {message['note']}")
        elif kind == "failure":
            rank.failure = message
            # The others needn't wait until it has printed its traceback and exited.
            self._failed(kinds.ERROR, 1, self._failure(rank, 1, None), spare=number)
        elif kind == "refused":
            rank.over, rank.goodbye, rank.status = True, True, "not started"
            self._failed(
                kinds.START_FAILED, HostError.exit_code, Failure(number, rank.host, error=message["error"])
            )
            self.control.send(number, {"type": "done"})
        elif kind == "exit":
            self._exited(rank, message["code"], message["signal"])
            self.control.send(number, {"type": "done"})

    def _note_event(self, number: int, message: Message) -> None:
        event = {"seconds": round(time.monotonic() - self.started, 3), "rank": number}
        event.update((k, v) for k, v in message.items() if k not in ("rank", "salt", "proof"))
        self.output.keep("events.jsonl", encode(event))

    def _exited(self, rank: _Rank, code: int | None, number: int | None) -> None:
        rank.over = rank.goodbye = True
        rank.status = f"exit {code}" if number is None else f"signal {number}"
        if self.ending:
            if self.first and self.first.rank == rank.rank and rank.failure:
                if number is not None and not self.spared_ended:
                    self.exit_code = 128 + number
                self.exit_code = code or self.exit_code
                self.first = self._failure(rank, self.exit_code, None)
            elif number is not None or code:
                rank.status = "ended by launcher"
        elif number is not None:
            self._failed(kinds.SIGNAL, 128 + number, self._failure(rank, None, number))
        elif code:
            self._failed(kinds.EXIT, code, self._failure(rank, code, None))

    def _lost(self, number: int) -> None:
        """The connection of a rank has ended."""
        rank = self.ranks[number]
        self.changed.set()
        if rank.over:
            return
        rank.over, rank.status = True, "ended by launcher" if self.ending else "lost"
        # The kernel closed the connection, so the host is alive and its keeper is not.
        self._failed(
            kinds.SIGNAL,
            128 + signal.SIGKILL,
            Failure(
                rank.rank, rank.host, signal=int(signal.SIGKILL), error="its keeper ended without a word"
            ),
        )

    @staticmethod
    def _failure(rank: _Rank, code: int | None, number: int | None) -> Failure:
        said: dict[str, Any] = rank.failure or {}
        return Failure(
            rank.rank, rank.host, number, code, said.get("error"), said.get("file"), said.get("line")
        )

    # ---- ending

    def _failed(self, kind: str, exit_code: int, failure: Failure, spare: int | None = None) -> None:
        """The first failure is the job's; all ranks but ``spare``, which ends by itself, are ended now."""
        if self.ending:
            return
        self.kind, self.exit_code, self.first = kind, exit_code, failure
        self._end_ranks(signal.SIGTERM, spare)

    def _interrupted(self, number: signal.Signals) -> None:
        self.signals += 1
        if self.signals == 1 and not self.ending:
            self.kind, self.exit_code = kinds.INTERRUPTED, 128 + number
            grace = self.plan.setting("watch.grace_period")
            self._end_ranks(number)
            self.tell(f"{number.name}: ending all ranks, {grace} s at most; once more to end them at once")
        elif self.signals > 1 or number != signal.SIGINT:
            self._end_ranks(signal.SIGKILL)

    def _end_ranks(self, number: signal.Signals, spare: int | None = None) -> None:
        self.ending = True
        loop = asyncio.get_running_loop()
        grace = self.plan.setting("watch.grace_period")
        self.end_message = {"type": "end", "signal": int(number), "grace": grace}
        for rank in self.ranks:
            if rank.rank != spare:
                self.control.send(rank.rank, self.end_message)
        if spare is not None:
            loop.call_later(SETTLE, self._end_spared, spare, self.end_message)
        loop.call_later((0 if number == signal.SIGKILL else grace) + 2 * SETTLE, self._give_up)
        if not any(rank.heard_at for rank in self.ranks):
            asyncio.create_task(self._end_starters(0))  # noqa: RUF006

    def _end_spared(self, spare: int, message: Message) -> None:
        self.spared_ended = True
        self.control.send(spare, message)

    def _give_up(self) -> None:
        """Ranks that are still there don't hear us."""
        for rank in self.ranks:
            if not rank.over:
                rank.over, rank.status = True, "killed by launcher"
        self.changed.set()

    async def _end_starters(self, patience: float = STARTER_EXIT) -> None:
        """Wait until the starters have ended; those that don't within ``patience`` are made to."""
        self.ending = self.ending or not all(rank.over for rank in self.ranks)
        for number in (None, *_ENDING_SIGNALS):
            for starter in self._running():
                if number is not None:
                    starter.send_signal(number)
            deadline = time.monotonic() + (patience if number is None else 1.0)
            while self._running() and (left := deadline - time.monotonic()) > 0:
                self.changed.clear()
                if self._running():  # none has ended since the question was asked
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self.changed.wait(), left)

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [starter for starter in self.starters if starter.poll() is None]
