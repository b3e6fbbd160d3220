"""A job as a state machine: something happens, and it says what to do.

Pure: it takes the time with each event, and the loop around it (``supervise.loop``) turns sockets, processes
and signals into events, and carries the actions out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from signal import SIGINT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any, NamedTuple

from cpulaunch import messages
from cpulaunch.errors import NODE_LOST_EXIT_CODE, SAVED_EXIT_CODE, STALLED_EXIT_CODE, HostError
from cpulaunch.messages import BEATS_PER_TIMEOUT, KINDS, AgentMessage, Unknown
from cpulaunch.supervise import outcome as kinds
from cpulaunch.supervise.arrivals import Arrivals
from cpulaunch.supervise.clocks import Clocks
from cpulaunch.supervise.dumps import Dumps
from cpulaunch.supervise.events import (
    Action,
    AgentConnected,
    AgentDisconnected,
    AgentSaid,
    Dumped,
    DumpWanted,
    EndProcesses,
    Event,
    Finish,
    HideStderr,
    Log,
    NotStarted,
    ProcessEnded,
    ProcessSaid,
    ReportStall,
    Send,
    ShowStatus,
    StartFailed,
    Tell,
    Tick,
    UserSignal,
    Write,
)
from cpulaunch.supervise.heartbeats import Heartbeats
from cpulaunch.supervise.notes import Notes
from cpulaunch.supervise.outcome import WITHOUT_A_WORD, Failure, Outcome, RankOutcome, signal_name
from cpulaunch.supervise.processes import SETTLE, Processes
from cpulaunch.supervise.rank import Rank, RankState, attempt_outcome
from cpulaunch.supervise.root_cause import Candidate, root_cause
from cpulaunch.supervise.sides import Sides, differ
from cpulaunch.supervise.stalls import REPORT, Stalls, StallSettings
from cpulaunch.supervise.status import Up, status_line

if TYPE_CHECKING:
    from cpulaunch.launchers.base import Launcher


class Watching(NamedTuple):
    """What doesn't change while a job is watched.

    ``hosts`` are those of the ranks, in the order of ranks; ``processes`` how many the launcher has, and
    ``command`` what they are called.  Periods are in seconds.  ``here_alone``: all ranks are on the
    launcher's host, where the kernel tells of an agent's end, and silence only of much to do.
    """

    hosts: Sequence[str]
    launcher: Launcher
    processes: int
    command: str
    heartbeat_timeout: float
    grace_period: float
    here_alone: bool = False
    stalls: StallSettings = StallSettings()


class JobState:
    """One attempt of a job, from the start of its processes to its outcome.

    ``handle`` every event; a ``Tick`` is due at ``wake_at`` at the latest, and every ``tick_period`` seconds.
    ``began`` is when the job's first attempt did, which times are counted from.  What an event or a
    tick costs doesn't grow with the number of ranks to which nothing has happened.
    """

    def __init__(self, watching: Watching, now: float, began: float | None = None) -> None:
        self.watching = watching
        self.ranks = [Rank(number, host) for number, host in enumerate(watching.hosts)]
        self.tick_period = min(1.0, watching.heartbeat_timeout / 6)
        self.ending = self.finished = False
        self.user_signals = 0
        self.interrupted: int | None = None
        self._now = self._started = self._looked_at = now
        self._began = now if began is None else began
        self._running = len(self.ranks)  # ranks whose state isn't final
        self._up = Up(watching.hosts)
        self._arrivals, self._clocks, self._heartbeats = Arrivals(self.ranks), Clocks(), Heartbeats()
        self._end: messages.End | None = None
        self._spared: tuple[int, float] | None = None  # a rank, and when its time is up
        self._give_up_at: float | None = None
        self._processes = Processes(watching.processes, watching.launcher)
        self._stalls = Stalls(self.ranks, watching.stalls, now)
        self._output_at: float | None = None
        self._steps = 0  # of optimizers, by the rank that has made most
        self._unknown: set[str] = set()
        self._notes = Notes()
        self._dumps = Dumps()
        self._sides: Sides | None = None  # once ranks call different operations
        self._actions: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about ``event``, in this order.  ``now`` never goes back."""
        self._now = now
        match event:
            case AgentSaid():
                self._heard(self.ranks[event.rank], event.message)
            case AgentConnected():
                self._connected(self.ranks[event.rank], event.hello, event.here)
            case AgentDisconnected():
                self._disconnected(self.ranks[event.rank], event.error)
            case ProcessSaid():
                self._processes.heard(event.data)
                self._look_for_a_failed_start()
            case ProcessEnded():
                self._process_ended(event.number, event.code)
            case StartFailed():
                rank = self.ranks[event.number]
                self._mark_failed(rank, kinds.START_FAILED, HostError.exit_code, event.error)
            case NotStarted():
                self._not_started(event.first)
            case UserSignal():
                self._interrupt(event.number)
            case DumpWanted():
                self._ask_for_dumps(event.native)
            case Tick():
                self._tick(event.terminal_full)
        if self._sides and not self.ending:
            self._end_others(spare=self._sides.first.rank)
        for over in self._dumps.take(now):
            self._actions.append(Dumped(over.native, over.answers, over.silent))
        if not self._running:
            self._finish()
        actions, self._actions = self._actions, []
        return actions

    @property
    def wake_at(self) -> float | None:
        """When something is due, if nothing else happens before."""
        moments = [self._spared[1]] if self._spared else []
        if self._give_up_at is not None:
            moments.append(self._give_up_at)
        if not self.ending and self._stalls.wake_at is not None:
            moments.append(self._stalls.wake_at)
        if self._sides and not self.ending:
            moments.append(self._sides.due)
        if (dumps_due := self._dumps.due) is not None:
            moments.append(dumps_due)
        if self._processes.ended_at is not None:
            moments.append(self._processes.ended_at + SETTLE)
        if self._may_be_missing and self._arrivals.wake_at is not None:
            moments.append(self._arrivals.wake_at)
        return min(moments, default=None)

    @property
    def untidy(self) -> list[Rank]:
        """Ranks whose agent hasn't said that nothing of them is left."""
        return [rank for rank in self.ranks if not rank.tidy]

    @property
    def failed(self) -> bool:
        """Whether any rank has failed by itself."""
        return self.interrupted is None and any(rank.candidate() for rank in self.ranks)

    @property
    def lost_hosts(self) -> set[str]:
        """Hosts that have fallen silent."""
        return {rank.host for rank in self.ranks if rank.failed and rank.failed.kind == kinds.NODE_LOST}

    # ---- agents

    def _connected(self, rank: Rank, hello: messages.Hello, here: bool) -> None:
        self._arrivals.arrived(rank, self._now)
        if not rank.state.final:
            self._heartbeats.expect(rank, self._now)
        if not here:
            rank.clock = self._now - hello.at  # as long as nothing better is known
            self._ask_time(rank)
        entry = hello._asdict()
        for name in ("rank", "salt", "proof"):
            del entry[name]
        self._log(rank, "hello", entry)
        if hello.version != messages.VERSION:
            # The loop closes the connection, whereupon the agent ends its program.
            self._move(rank, RankState.FAILED_TO_START)
            error = (
                f"the agent on {rank.host} speaks version {hello.version} of the control protocol, the "
                f"launcher version {messages.VERSION}: install the same cpulaunch on all hosts"
            )
            self._mark_failed(rank, kinds.START_FAILED, HostError.exit_code, error)
        elif self._end:
            self._send(rank, self._end)  # which it has missed

    def _heard(self, rank: Rank, message: AgentMessage | Unknown) -> None:
        self._heartbeats.heard(rank, self._now)
        if isinstance(message, messages.Dump):
            self._dumps.said(rank.rank, message)
            if self._sides:
                self._sides.dumped(rank, message)
            self._about_stalls(self._stalls.dumped(rank, message, self._now))
            return
        if isinstance(message, messages.Beat):
            rank.beats(message, self._now)
            self._steps = max(self._steps, message.steps)
            if self._clocks.outdated(rank, self._now):
                self._ask_time(rank)
            self._about_stalls(self._stalls.beat(rank, message, self._now))
            return
        if isinstance(message, messages.Output):
            self._output_at = self._now
            self._about_stalls(self._stalls.printed(self._now))
            self._actions.append(Write(rank.rank, message.stream, messages.unpack(message.data)))
            return
        if isinstance(message, messages.Time):
            self._clocks.learn(rank, message.at, self._now)
            return
        if isinstance(message, Unknown):
            self._unknown_kind(rank, message.kind)
            return
        self._log(rank, KINDS[type(message)], message._asdict())
        self._goes_through(rank, message)

    def _goes_through(self, rank: Rank, message: AgentMessage) -> None:
        """Something has happened to the rank that doesn't happen all the time."""
        if isinstance(message, messages.Started):
            rank.pid, rank.cores = message.pid, message.cores
            self._move(rank, RankState.RUNNING)
            for note in message.notes:
                self._notes.add(rank, note, self._now)
        elif isinstance(message, messages.Note):
            self._notes.add(rank, message.note, self._now)
        elif isinstance(message, messages.Resumed):
            rank.resumed_from = message.step
        elif isinstance(message, messages.Saved):
            rank.saved = True
        elif isinstance(message, messages.Failure):
            rank.raised = rank.raised or message
            # Its traceback is shown at the end if it is the cause.
            self._actions.append(HideStderr(rank.rank))
            if not self._sides and not self.ending and differ(message.error):
                self._sides = Sides(self.ranks, rank, self._now)
                self._actions += self._sides.ask()
            # The others needn't wait until it has printed its traceback and exited.
            self._end_others(spare=rank.rank)
        elif isinstance(message, messages.Refused):
            rank.tidy = True
            self._move(rank, RankState.FAILED_TO_START)
            self._mark_failed(rank, kinds.START_FAILED, HostError.exit_code, message.error)
            self._send(rank, messages.Release())
        elif isinstance(message, messages.Exit):
            self._exited(rank, message)
            self._send(rank, messages.Release())

    def _ask_for_dumps(self, native: bool) -> None:
        running = (rank.rank for rank in self.ranks if rank.state is RankState.RUNNING)
        _, sends = self._dumps.ask(running, native, self._now)
        self._actions += sends

    def _ask_time(self, rank: Rank) -> None:
        self._clocks.asked(rank, self._now)
        self._send(rank, messages.AskTime())

    def _unknown_kind(self, rank: Rank, kind: str) -> None:
        self._log(rank, kind, {"unknown": True})
        if kind not in self._unknown:
            self._unknown.add(kind)
            self._tell(
                f"{rank.host}: the agent of rank {rank.rank} sent a message of an unknown kind, {kind!r}"
            )

    def _exited(self, rank: Rank, end: messages.Exit) -> None:
        rank.tidy = True
        rank.exit = end
        if end.by_launcher and end.code != 0:
            self._move(rank, RankState.ENDED_BY_LAUNCHER)
        else:
            self._move(rank, RankState.EXITED if end.signal is None else RankState.SIGNALED)
        if rank.candidate():
            self._blame_launcher()
            self._end_others()

    def _disconnected(self, rank: Rank, error: str) -> None:
        if rank.state.final:
            return
        if self.ending:
            self._move(rank, RankState.ENDED_BY_LAUNCHER)
            return
        self._move(rank, RankState.LOST)
        if error:
            why = f"the launcher can't understand its agent: {error}"
            self._mark_failed(rank, kinds.ERROR, 1, why)
            return
        # The kernel closed the connection, so the host is alive and the agent is not.
        failure = Failure(rank.rank, rank.host, signal=int(SIGKILL), error=WITHOUT_A_WORD)
        rank.failed = Candidate(self._now, kinds.SIGNAL, 128 + SIGKILL, failure)
        self._blame_launcher()
        self._end_ranks(SIGTERM)

    # ---- the launcher's processes

    def _look_for_a_failed_start(self, *, ended: bool = False) -> None:
        if not self._arrivals or (found := self._processes.start_failure(ended=ended)) is None:
            return
        rank = self._arrivals.first(found.host)
        if rank.failed is None:
            error = f"it couldn't be started on {found.host}: {found.why}"
            self._mark_failed(rank, kinds.START_FAILED, HostError.exit_code, error, self._started)

    def _process_ended(self, number: int, code: int) -> None:
        self._processes.end(number, code, self._now)
        if self.watching.launcher.agents_are_children:
            self._arrivals.agent_ended(number, self._now)
        self._blame_launcher()

    def _blame_launcher(self) -> None:
        """Agents that end with an mpiexec that somebody kills haven't failed themselves."""
        signal = self._processes.killed_by
        if signal is None or self.watching.launcher.agents_are_children:
            return
        mpiexec = self.watching.command.rpartition("/")[2]
        error = f"{mpiexec} got {signal_name(signal)}, not from us, and its agent ended with it"
        for rank in self.ranks:
            found = rank.candidate()
            if not found or self._now > found.at + SETTLE:
                continue
            if found.by_signal or found.failure.error == WITHOUT_A_WORD:
                failure = Failure(rank.rank, rank.host, signal=signal, error=error)
                rank.failed = found._replace(exit_code=128 + signal, failure=failure)

    def _not_started(self, first: int) -> None:
        """There are no ranks from ``first`` on, nor processes."""
        for rank in self.ranks[first:]:
            rank.tidy = True
            self._arrivals.expect_no_more(rank)
            self._move(rank, RankState.FAILED_TO_START)
        self._processes.no_more_than(first, self._now)

    def _look_at_ended_processes(self) -> None:
        """Once the launcher's processes have ended, nothing more is heard of ranks that are still there."""
        ended_at = self._processes.ended_at
        if ended_at is None or self._now < ended_at + SETTLE:
            return
        if not self.ending:
            self._look_for_a_failed_start(ended=True)
        if not self.ending:
            self._processes_ended_early()
        self._finish()

    def _processes_ended_early(self) -> None:
        there = [rank for rank in self.ranks if not rank.state.final]
        if self._processes.unreached:
            for rank in there:
                self._move(rank, RankState.NOT_WATCHED)
        elif there:
            error = (
                f"{self.watching.command} ended with code {self._processes.exit_code} "
                f"before {len(there)} of {len(self.ranks)} ranks had reported"
            )
            self._mark_failed(there[0], kinds.START_FAILED, HostError.exit_code, error)

    # ---- time

    def _tick(self, terminal_full: bool) -> None:
        asleep, self._looked_at = self._now - self._looked_at, self._now
        if asleep > self.watching.heartbeat_timeout / 2:
            self._forgive(asleep)
        elif terminal_full:
            self._heartbeats.forgive(asleep, self._now)
            self._stalls.forgive(asleep, self._now)
        self._about_stalls(self._stalls.look(self._now))
        self._look_for_silence()
        self._look_for_the_missing()
        for rank in self._clocks.due(self._now):
            self._ask_time(rank)
        if self._spared and self._end and self._now >= self._spared[1]:
            self._send(self.ranks[self._spared[0]], self._end)
            self._spared = None
        if self._give_up_at is not None and self._now >= self._give_up_at:
            self._give_up()
        self._look_at_ended_processes()
        starting = bool(self._arrivals) and not self.ending
        for line in self._notes.take(self._now, starting=starting):
            self._tell(line)
        self._actions.append(ShowStatus(self._status()))

    def _forgive(self, asleep: float) -> None:
        """The launcher was stopped: that nothing was heard, nor done, is nobody else's fault."""
        self._heartbeats.forgive(asleep, self._now)
        self._arrivals.forgive(asleep, self._now)
        self._stalls.forgive(asleep, self._now)
        if self._give_up_at is not None:
            self._give_up_at += asleep

    def _look_for_silence(self) -> None:
        lost = {rank.host for rank in self._silent(self.watching.heartbeat_timeout)}
        for rank in self._silent(self._two_beats) if lost else ():
            if rank.host in lost:  # those beside it may be due a moment later
                self._lose(rank)

    def _silent(self, seconds: float) -> list[Rank]:
        """Ranks that should run, but haven't been heard for so long."""
        if self.watching.here_alone:
            return []
        return self._heartbeats.silent(seconds, self._now)

    @property
    def _two_beats(self) -> float:
        return 1.5 * self.watching.heartbeat_timeout / BEATS_PER_TIMEOUT

    def _lose(self, rank: Rank) -> None:
        silence = self._now - rank.heard_at
        self._move(rank, RankState.LOST)
        error = f"no sign of life from host {rank.host} for {silence:.0f} s: it, or its network, is down"
        self._mark_failed(rank, kinds.NODE_LOST, NODE_LOST_EXIT_CODE, error, rank.heard_at)

    def _about_stalls(self, actions: Sequence[Action]) -> None:
        if self.ending:
            return
        self._actions += actions
        for action in actions:
            if isinstance(action, ReportStall):
                stall = action.stall
                rank = self.ranks[next(iter(stall.ranks), 0)]
                fields = asdict(stall)
                self._log(rank, "stall", {"lasted": fields.pop("seconds"), **fields})
                if self.watching.stalls.action != REPORT:
                    error = f"no progress for {stall.seconds:.0f} s: {stall.text}"
                    failure = Failure(rank.rank, rank.host, error=error, file=stall.file, line=stall.line)
                    rank.failed = Candidate(self._now, kinds.STALLED, STALLED_EXIT_CODE, failure)
                    self._end_ranks(SIGTERM)

    @property
    def _may_be_missing(self) -> bool:
        return not self.ending and not self._processes.unreached

    def _look_for_the_missing(self) -> None:
        """Ranks that have never said hello, though their agent has ended, or others did long ago."""
        if not self._may_be_missing:
            return
        if rank := self._arrivals.without_agent(self._now):
            self._move(rank, RankState.FAILED_TO_START)
            why = "its agent ended before it said hello"
            self._mark_failed(rank, kinds.START_FAILED, HostError.exit_code, why)
            return
        timeout = self.watching.heartbeat_timeout
        if self._arrivals.overdue(timeout, self._now):
            why = f"no sign of life within {timeout:.0f} s of the last rank's that has come"
            self._mark_failed(self._arrivals.first(), kinds.START_FAILED, HostError.exit_code, why)

    # ---- ending

    def _interrupt(self, number: int) -> None:
        self.user_signals += 1
        if self.user_signals == 1 and not self.ending:
            self.interrupted = number
            self._tell(
                f"{signal_name(number)}: ending all ranks, {self.watching.grace_period} s at most; "
                "send it again to kill them now"
            )
            self._end_ranks(number)
        elif self.user_signals > 1 or number != SIGINT:
            self._end_ranks(SIGKILL)

    def _mark_failed(self, rank: Rank, kind: str, code: int, error: str, at: float | None = None) -> None:
        """The rank has failed, though its agent doesn't say so itself."""
        failure = Failure(rank.rank, rank.host, error=error)
        rank.failed = Candidate(self._now if at is None else at, kind, code, failure)
        self._end_ranks(SIGTERM)

    def _end_others(self, spare: int | None = None) -> None:
        """A rank has failed: end the others; where they disagree, once they have said their sides."""
        if self._sides is None or self._sides.over(self._now):
            self._end_ranks(SIGTERM, spare)

    def _end_ranks(self, number: int, spare: int | None = None) -> None:
        """End all ranks but ``spare``, which ends by itself.  Once is enough, but for SIGKILL."""
        if self.ending and number != SIGKILL:
            return
        self.ending = True
        grace = self.watching.grace_period
        self._end = messages.End(int(number), grace)
        for rank in self.ranks:
            if rank.rank != spare:
                self._send(rank, self._end)
        if spare is not None:
            self._spared = spare, self._now + SETTLE
        give_up_at = self._now + (0 if number == SIGKILL else grace) + 2 * SETTLE
        self._give_up_at = min(give_up_at, self._give_up_at or give_up_at)
        if self._arrivals.none_yet:
            self._actions.append(EndProcesses())

    def _give_up(self) -> None:
        """Ranks that are still there don't hear us."""
        self._give_up_at = None
        for rank in self._silent(self._two_beats):
            self._lose(rank)
        for rank in self.ranks:
            if not rank.state.final:
                self._move(rank, RankState.KILLED_BY_LAUNCHER)

    def _finish(self) -> None:
        if not self.finished:
            self.finished = True
            for line in self._notes.take_all():
                self._tell(line)
            self._actions.append(Finish())

    # ---- what comes of it

    def outcome(self, now: float) -> Outcome:
        """How the job has ended, once all is cleaned up."""
        for rank in self.ranks:
            if rank.state is RankState.NOT_STARTED:
                self._move(rank, RankState.FAILED_TO_START)
            elif not rank.state.final:
                self._move(rank, RankState.ENDED_BY_LAUNCHER)
        succeeded = [
            (rank.exit.at + rank.clock, rank.rank) for rank in self.ranks if rank.exit and rank.exit.code == 0
        ]
        cause = root_cause([found for rank in self.ranks if (found := rank.candidate())], succeeded)
        kind, code, first = kinds.OK, 0, None
        if self._has_saved:
            kind, code = kinds.INTERRUPTED, SAVED_EXIT_CODE
        elif self.interrupted is not None:
            kind, code = kinds.INTERRUPTED, 128 + self.interrupted
        elif cause:
            kind, code, first = cause.kind, cause.exit_code, cause.failure
            if self._sides and differ(first.error or ""):
                first = replace(first, note=self._sides.note())
        elif self._processes.unreached and (code := self._processes.exit_code):
            kind = kinds.EXIT
        ranks = tuple(RankOutcome(r.rank, r.host, r.pid, r.cores, r.status) for r in self.ranks)
        attempt = attempt_outcome(self.ranks, kind, now - self._started)
        stalls = tuple(self._stalls.stalls)
        return Outcome(code, kind, now - self._began, first, ranks, stalls=stalls, attempts=(attempt,))

    @property
    def _has_saved(self) -> bool:
        """Whether a signal has ended the program, which has saved its state before."""
        failures = {found.exit_code for rank in self.ranks if (found := rank.candidate())}
        return any(rank.saved for rank in self.ranks) and failures <= {SAVED_EXIT_CODE}

    # ---- helpers

    def _move(self, rank: Rank, state: RankState) -> None:
        if rank.state.final and not state.final:
            return  # a word that comes late changes nothing
        if state.final and not rank.state.final:
            self._running -= 1
            self._dumps.gone(rank.rank)
            self._heartbeats.expect_no_more(rank)
        self._up.moves(rank.host, rank.state is RankState.RUNNING, state is RankState.RUNNING)
        rank.state = state

    def _send(self, rank: Rank, message: messages.LauncherMessage) -> None:
        self._actions.append(Send(rank.rank, message))

    def _tell(self, line: str) -> None:
        self._actions.append(Tell(line))

    def _log(self, rank: Rank, kind: str, fields: Mapping[str, Any]) -> None:
        seconds = round(self._now - self._began, 3)
        self._actions.append(Log({"seconds": seconds, "rank": rank.rank, "type": kind, **fields}))

    def _status(self) -> str:
        since_output = None if self._output_at is None else self._now - self._output_at
        return status_line(self._up, self._now - self._began, self._steps, since_output)
