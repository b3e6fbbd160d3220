"""Watch a job's ranks, end it, and say how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import IO

from cpulaunch import launchers
from cpulaunch.errors import HostError
from cpulaunch.messages import BEATS_PER_TIMEOUT, UNREACHED, Message, encode, unpack
from cpulaunch.plan.plan import Plan
from cpulaunch.supervise import outcome as kinds
from cpulaunch.supervise.attempt import Job
from cpulaunch.supervise.control import Control
from cpulaunch.supervise.outcome import Failure, Outcome, RankOutcome
from cpulaunch.supervise.output import Output
from cpulaunch.supervise.ranks import Rank
from cpulaunch.supervise.root_cause import Candidate, root_cause
from cpulaunch.supervise.stop import end_starters, running, sweep_hosts
from cpulaunch.supervise.sweep import sweep

SETTLE = 1.0
"""Seconds in which messages may still arrive from ranks whose starter has ended."""

STARTER_EXIT = 5.0
"""Seconds that a starter has to end by itself after its last rank did; much less where a host is lost."""

MAX_HEARD = 1 << 16
"""Bytes of what the starters say in which a reason is looked for."""

NOISE = b"IPL WARN> "
"""How Intel MPI's lines on a topology that it doesn't need begin; the starter's log keeps them."""

ENDED = "ended by launcher"


class Watch:
    """One job, from the start of its commands to its outcome."""

    def __init__(
        self,
        plan: Plan,
        job: Job,
        starters: Sequence[subprocess.Popen[bytes]],
        output: Output,
        tell: Callable[[str], None],
        *,
        verbose: bool = False,
    ) -> None:
        self.plan, self.job, self.starters = plan, job, starters
        self.output, self.tell, self.verbose = output, tell, verbose
        self.ranks = [Rank(rank.rank, host.host) for host in plan.hosts for rank in host.ranks]
        self.control = Control(job.token, plan.world_size, self._heard, self._lost, output.screen.room)
        self.changed = asyncio.Event()
        self.started = self.looked_at = time.monotonic()
        self.timeout: float = plan.setting("watch.heartbeat_timeout")
        self.grace: float = plan.setting("watch.grace_period")
        self.ending = False
        self.interrupted: int | None = None
        self.end_message: Message | None = None
        self.first_hello: float | None = None
        self.signals = 0
        self.unreached = False
        self.began = time.time()
        self.said = b""

    async def run(self, listener: socket.socket) -> Outcome:
        """Watch until all ranks have ended.  Returns when no process of the job is left on any host."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as it is under nohup
                loop.add_signal_handler(number, self._interrupted, number)
        loop.add_signal_handler(signal.SIGCHLD, self.changed.set)
        relays: list[asyncio.Task[None]] = []
        try:
            await self.control.listen(listener)
            for starter in self.starters:
                for pipe, stream in ((starter.stdout, 1), (starter.stderr, 2)):
                    relays.append(asyncio.create_task(self._relay(pipe, stream)))
            await self._watch()
        finally:
            await self._clean_up()
            await asyncio.wait(relays, timeout=SETTLE)
            await self.control.close()
        for rank in self.ranks:
            self.output.finish(rank.rank)
        self.output.flush()
        return self._outcome()

    async def _relay(self, source: IO[bytes] | None, stream: int) -> None:
        """Show what mpiexec, ssh and unwatched agents say; once we end them, only keep it."""
        pipe = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), source)
        while data := await pipe.read(1 << 16):
            self.unreached = self.unreached or UNREACHED.encode() in data
            self.output.keep("starter.log", data)
            self._look_for_a_failed_start(data)
            if not self.ending:
                shown = (line for line in data.splitlines(True) if not line.startswith(NOISE))
                self.output.screen.put(stream, b"".join(shown))
            await self.output.screen.room()

    def _look_for_a_failed_start(self, data: bytes = b"", *, ended: bool = False) -> None:
        missing = [rank for rank in self.ranks if rank.heard_at is None]
        if self.interrupted is not None or not missing:
            return
        self.said = (self.said + data)[-MAX_HEARD:]
        if found := launchers.load(self.plan.starter).start_failure(
            self.said.decode(errors="replace"), ended=ended
        ):
            host, why = found
            short = host.partition(".")[0]
            rank = next((r for r in missing if r.host in (host, short)), missing[0])
            if rank.verdict is None:
                error = f"it couldn't be started on {host}: {why}"
                self._condemn(rank, kinds.START_FAILED, HostError.exit_code, error, self.began)

    # ---- watching

    async def _watch(self) -> None:
        quiet_since = None
        while not all(rank.over for rank in self.ranks):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.2 if quiet_since else 1.0)
            self.changed.clear()
            self._look_for_silence()
            self._look_for_the_missing()
            self.output.screen.status(self._how_it_goes())
            if not running(self.starters):
                quiet_since = quiet_since or time.monotonic()
                if time.monotonic() > quiet_since + SETTLE:
                    break
        missing = [rank for rank in self.ranks if not rank.over]
        if missing and not self.ending:
            self._look_for_a_failed_start(ended=True)
        if missing and not self.ending:
            self._starter_ended_early(missing)

    def _how_it_goes(self) -> str:
        """One line: who is up, for how long, and when anything was last said."""
        up = Counter(rank.host for rank in self.ranks if rank.status == "running")
        sizes = Counter(rank.host for rank in self.ranks)
        parts = [f"{sum(up.values())} of {len(self.ranks)} ranks up"]
        if len(sizes) > 1:
            fewer = [f"{host} {up[host]}/{size}" for host, size in sizes.items() if up[host] < size]
            parts += [", ".join(fewer[:3]) + (" …" if len(fewer) > 3 else "")] if fewer else []
        parts.append(_duration(time.monotonic() - self.started))
        if self.output.last_at:
            parts.append(f"last output {_duration(time.monotonic() - self.output.last_at)} ago")
        return "cpulaunch: " + " · ".join(parts)

    def _starter_ended_early(self, missing: list[Rank]) -> None:
        if self.unreached:
            for rank in missing:
                rank.status = "not watched"
            return
        rank = missing[0]
        error = (
            f"{self.plan.mpiexec or 'the agent'} ended with code {self._starters_code()} "
            f"before {len(missing)} of {len(self.ranks)} ranks had reported"
        )
        self._condemn(rank, kinds.START_FAILED, HostError.exit_code, error)

    def _starters_code(self) -> int:
        code = next((s.returncode for s in self.starters if s.returncode), 0)
        return 128 - code if code < 0 else code

    def _look_for_silence(self) -> None:
        """A rank that says nothing for too long is lost; but not if it was us who couldn't listen."""
        now = time.monotonic()
        asleep, self.looked_at = now - self.looked_at, now
        if asleep > self.timeout / 2 or self.output.screen.full:  # stopped by Ctrl-Z, or by our terminal
            for rank in self.ranks:
                rank.heard_at = rank.heard_at and rank.heard_at + asleep
        lost = {rank.host for rank in self.ranks if self._silent(rank, self.timeout)}
        for rank in self.ranks:
            # Those beside it may be due a moment later.
            if rank.host in lost and self._silent(rank, 1.5 * self.timeout / BEATS_PER_TIMEOUT):
                self._lose(rank)

    def _silent(self, rank: Rank, seconds: float) -> bool:
        return not rank.over and rank.heard_at is not None and time.monotonic() > rank.heard_at + seconds

    def _lose(self, rank: Rank) -> None:
        assert rank.heard_at is not None
        silence = time.monotonic() - rank.heard_at
        rank.over, rank.status = True, "lost"
        error = f"no sign of life from host {rank.host} for {silence:.0f} s: it, or its network, is down"
        self._condemn(rank, kinds.NODE_LOST, 4, error, time.time() - silence)

    def _look_for_the_missing(self) -> None:
        """Ranks that have never said hello, though their agent has ended, or others did long ago."""
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
            if (rank.missed_at and now > rank.missed_at + SETTLE) or now > first + self.timeout:
                why = (
                    "its agent ended before it said hello"
                    if gone
                    else f"no sign of life within {self.timeout:.0f} s of the first rank's"
                )
                rank.over = gone
                self._condemn(rank, kinds.START_FAILED, HostError.exit_code, why)
                return

    def _heard(self, number: int, message: Message) -> None:
        rank = self.ranks[number]
        rank.heard_at = time.monotonic()
        kind = message["type"]
        if kind == "output":
            self.output.feed(number, message["stream"], unpack(message["data"]))
            return
        self.changed.set()
        if kind != "beat":
            self._note_event(rank, message)
        if kind == "hello":
            self.first_hello = self.first_hello or time.monotonic()
            rank.clock = time.time() - message["at"]
            if self.end_message:
                self.control.send(number, self.end_message)  # it has missed it
        elif kind == "started":
            rank.pid, rank.cores, rank.status = message["pid"], message["cores"], "running"
            for note in message["notes"]:
                self.tell(f"{rank.host}: {note}")
        elif kind == "note":
            self.tell(f"{rank.host}: {message['note']}")
        elif kind == "failure":
            rank.failure = rank.failure or message
            self.output.hide(number, 2)  # the traceback, which is shown at the end if it is the cause
            # The others needn't wait until it has printed its traceback and exited.
            self._end_ranks(signal.SIGTERM, spare=number)
        elif kind == "refused":
            rank.over = rank.goodbye = True
            self._condemn(rank, kinds.START_FAILED, HostError.exit_code, message["error"])
            self.control.send(number, {"type": "done"})
        elif kind == "exit":
            self._exited(rank, message)
            self.control.send(number, {"type": "done"})

    def _note_event(self, rank: Rank, message: Message) -> None:
        event = {"seconds": round(time.monotonic() - self.started, 3), "rank": rank.rank}
        event.update((k, v) for k, v in message.items() if k not in ("rank", "salt", "proof"))
        self.output.keep("events.jsonl", encode(event))
        if self.verbose:
            values = (f"{k}={v}" for k, v in event.items() if k in _SHOWN_OF_EVENTS and v is not None)
            self.tell(f"{event['seconds']:.3f} s: rank {rank.rank} on {rank.host}: {' '.join(values)}")

    def _exited(self, rank: Rank, message: Message) -> None:
        rank.over = rank.goodbye = True
        rank.end = message
        code, number = message["code"], message["signal"]
        if code == 0 or not message["told"]:
            rank.status = f"exit {code}" if number is None else f"signal {number}"
        else:
            rank.status = ENDED
        if rank.candidate():
            self._end_ranks(signal.SIGTERM)

    def _lost(self, number: int) -> None:
        """The connection of a rank has ended."""
        rank = self.ranks[number]
        self.changed.set()
        if rank.over:
            return
        rank.over = True
        if self.ending:
            rank.status = ENDED
            return
        # The kernel closed the connection, so the host is alive and its agent is not.
        rank.status = "lost"
        rank.verdict = Candidate(
            time.time(),
            kinds.SIGNAL,
            128 + signal.SIGKILL,
            Failure(number, rank.host, signal=int(signal.SIGKILL), error="its agent ended without a word"),
        )
        self._end_ranks(signal.SIGTERM)

    # ---- ending

    def _condemn(self, rank: Rank, kind: str, code: int, error: str, at: float | None = None) -> None:
        """The rank has failed, though it doesn't say so itself."""
        failure = Failure(rank.rank, rank.host, error=error)
        rank.verdict = Candidate(time.time() if at is None else at, kind, code, failure)
        self._end_ranks(signal.SIGTERM)

    def _interrupted(self, number: signal.Signals) -> None:
        self.signals += 1
        self.output.screen.hurry()
        if self.signals == 1 and not self.ending:
            self.interrupted = number
            self.tell(
                f"{number.name}: ending all ranks, {self.grace} s at most; once more to end them at once"
            )
            self._end_ranks(number)
        elif self.signals > 1 or number != signal.SIGINT:
            self._end_ranks(signal.SIGKILL)

    def _end_ranks(self, number: signal.Signals, spare: int | None = None) -> None:
        """End all ranks but ``spare``, which ends by itself.  Once is enough, but for SIGKILL."""
        if self.ending and number != signal.SIGKILL:
            return
        self.ending = True
        self.changed.set()
        loop = asyncio.get_running_loop()
        self.end_message = {"type": "end", "signal": int(number), "grace": self.grace}
        for rank in self.ranks:
            if rank.rank != spare:
                self.control.send(rank.rank, self.end_message)
        if spare is not None:
            loop.call_later(SETTLE, self.control.send, spare, self.end_message)
        loop.call_later((0 if number == signal.SIGKILL else self.grace) + 2 * SETTLE, self._give_up)
        if not any(rank.heard_at for rank in self.ranks):
            asyncio.create_task(end_starters(self.starters, 0, self.changed))  # noqa: RUF006

    def _give_up(self) -> None:
        """Ranks that are still there don't hear us."""
        for rank in self.ranks:
            if self._silent(rank, 1.5 * self.timeout / BEATS_PER_TIMEOUT):
                self._lose(rank)
            elif not rank.over:
                rank.over, rank.status = True, "killed by launcher"
        self.changed.set()

    async def _clean_up(self) -> None:
        """Nothing of the job stays, neither a starter nor what it should have ended."""
        here = self.plan.starter == "local" or self.plan.here_alone
        dirty = [rank for rank in self.ranks if not rank.goodbye]  # an agent that says so has left nothing
        well = not any(rank.status == "lost" for rank in dirty)
        ending = end_starters(self.starters, STARTER_EXIT if well else 0.5, self.changed)
        await asyncio.gather(ending, sweep_hosts(() if here else {rank.host for rank in dirty}, self.job.id))
        if dirty:
            sweep(self.job.id)

    def _outcome(self) -> Outcome:
        candidates = [found for rank in self.ranks if (found := rank.candidate())]
        left = [(r.end["at"] + r.clock, r.rank) for r in self.ranks if r.end and r.end["code"] == 0]
        cause = root_cause(candidates, left)
        kind, code, first = kinds.OK, 0, None
        if self.interrupted is not None:
            kind, code = kinds.INTERRUPTED, 128 + self.interrupted
        elif cause:
            kind, code, first = cause.kind, cause.exit_code, cause.failure
        elif self.unreached and (code := self._starters_code()):
            kind = kinds.EXIT
        for rank in self.ranks:
            if not rank.over and rank.status != "not watched":
                rank.status = ENDED
        ranks = tuple(RankOutcome(r.rank, r.host, r.pid, r.cores, r.status) for r in self.ranks)
        return Outcome(code, kind, time.monotonic() - self.started, first, ranks, self.job.restart_count)


_SHOWN_OF_EVENTS = (
    "type",
    "pid",
    "cores",
    "comm_cores",
    "threads",
    "code",
    "signal",
    "told",
    "error",
    "note",
)


def _duration(seconds: float) -> str:
    """``"1:02:03"``, ``"4:05"``, ``"6 s"``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
