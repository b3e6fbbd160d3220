"""A job as a state machine: it takes events and returns actions.

Pure: each event comes with its time.  The loop (``supervise.attempts.loop``) turns sockets, processes and
signals into events, and carries out the actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from cpulaunch.cause import Cause, Kind
from cpulaunch.supervise.job import agents, ending, events, launch
from cpulaunch.supervise.job import outcome as kinds
from cpulaunch.supervise.job.outcome import Outcome
from cpulaunch.supervise.job.processes import SETTLE
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.supervise.job.state import State, Watching
from cpulaunch.supervise.job.status import status_line


class JobState(State):
    """One attempt of a job, from the start of its processes to its outcome.

    ``handle`` takes every event.  A ``Tick`` is due every ``tick_period`` seconds, and at ``wake_at`` at the
    latest.  Times in logs and outcomes count from ``began``, the start of the job's first attempt.  An event
    or a tick costs time only for the ranks that it concerns.
    """

    def __init__(self, watching: Watching, now: float, began: float | None = None) -> None:
        super().__init__(watching, now, now if began is None else began)
        self.tick_period = min(1.0, watching.heartbeat_timeout / 6)

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Return the actions for ``event``, in order.  ``now`` must never decrease."""
        self.now = now
        self._handle(event)
        if self.calls and not self.ending:
            ending.end_others(self, spare=self.calls.first.rank)
        self.actions += self.rounds.look(now)
        if not self.running:
            ending.finish(self)
        actions, self.actions = self.actions, []
        return actions

    def _handle(self, event: events.Event) -> None:
        match event:
            case events.AgentSent(rank, message):
                agents.handle_message(self, self.ranks[rank], message)
            case events.AgentConnected(rank, hello, here):
                agents.handle_connection(self, self.ranks[rank], hello, here)
            case events.AgentReconnected(rank):
                self.heartbeats.record(self.ranks[rank], self.now)
                self.log(rank, "connected_again", {})
            case events.AgentDisconnected(rank, error):
                agents.handle_disconnection(self, self.ranks[rank], error)
            case events.ProcessPrinted(data):
                self.processes.add_output(data)
                launch.check_failed_start(self)
                launch.check_lost_hosts(self)
            case events.ProcessEnded(number, code):
                launch.handle_process_end(self, number, code)
            case events.StartFailed(number, error):
                failed = self.ranks[number]
                ending.mark_failed(self, failed, Cause(Kind.REFUSED, host=failed.host, detail=error))
            case events.NotStarted(first):
                launch.handle_not_started(self, first)
            case events.UserSignal(number):
                ending.interrupt(self, number)
            case events.DumpRequested(native):
                running = (each.rank for each in self.ranks if each.state is RankState.RUNNING)
                self.actions += self.rounds.ask(running, native, self.now)
            case events.Tick(terminal_full):
                self._tick(terminal_full)

    def _tick(self, terminal_full: bool) -> None:
        asleep, self.last_tick = self.now - self.last_tick, self.now
        if asleep > self.watching.heartbeat_timeout / 2:
            self._extend_deadlines(asleep)
        elif terminal_full:
            self.heartbeats.forgive(asleep, self.now)
            self.stalls.forgive(asleep, self.now)
        agents.add_stall_actions(self, self.stalls.look(self.now))
        agents.check_silence(self)
        launch.check_arrivals(self)
        for rank in self.clocks.due(self.now):
            agents.ask_time(self, rank)
        ending.check_deadlines(self)
        launch.check_processes(self)
        starting = bool(self.arrivals) and not self.ending
        for line in (*self.notes.take(self.now, starting=starting), *self.failures.take(self.now)):
            self.tell(line)
        self.actions.append(events.ShowStatus(self._status()))

    def _extend_deadlines(self, asleep: float) -> None:
        """Extend all deadlines by ``asleep`` seconds, during which the launcher was suspended."""
        self.heartbeats.forgive(asleep, self.now)
        self.arrivals.forgive(asleep, self.now)
        self.stalls.forgive(asleep, self.now)
        if self.give_up_at is not None:
            self.give_up_at += asleep

    def _status(self) -> str:
        since_output = None if self.output_at is None else self.now - self.output_at
        steps = self.telemetry.summary() or (f"step {self.steps}" if self.steps else "")
        return status_line(self.up, self.now - self.began, self.watching.restarts, steps, since_output)

    def outcome(self, now: float, waited: Sequence[str] = ()) -> Outcome:
        """Return the attempt's outcome after the clean-up.  ``waited`` lists slow parts of the clean-up."""
        return ending.outcome(self, now, waited)

    # ---- what the loop reads

    @property
    def wake_at(self) -> float | None:
        """The time of the next tick, unless an event comes first; None if no tick is due."""
        moments = [self.give_up_at, self.rounds.due]
        if self.spared:
            moments.append(self.spared[1])
        if not self.ending:
            moments.append(self.stalls.wake_at)
        if self.calls and not self.ending:
            moments.append(self.calls.due)
        if self.processes.ended_at is not None and not self.ranks_end_by_themselves:
            moments.append(self.processes.ended_at + SETTLE)
        if self.may_be_missing:
            moments.append(self.arrivals.wake_at)
        return min((moment for moment in moments if moment is not None), default=None)

    def stalled(self, now: float) -> str:
        """Describe the job's current stall; empty if the job is not stalled."""
        return "" if self.ending else self.stalls.describe(now)

    @property
    def untidy(self) -> list[Rank]:
        """Ranks whose agents haven't confirmed that all processes of the rank have ended."""
        return [rank for rank in self.ranks if not rank.tidy]

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, and the job was not ended by a signal to the launcher."""
        return self.interrupted is None and any(rank.candidate() for rank in self.ranks)

    @property
    def lost_hosts(self) -> set[str]:
        """Hosts that are silent, or that the batch system reports as failed."""
        return {rank.host for rank in self.ranks if rank.failed and rank.failed.kind == kinds.NODE_LOST}
