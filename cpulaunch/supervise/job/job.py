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
    latest.  Times in logs and outcomes count from ``began``, the start of the job's first attempt.  The cost
    of an event or a tick doesn't grow with the number of ranks to which nothing has happened.
    """

    def __init__(self, watching: Watching, now: float, began: float | None = None) -> None:
        super().__init__(watching, now, now if began is None else began)
        self.tick_period = min(1.0, watching.heartbeat_timeout / 6)

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Return the actions for ``event``, in order.  ``now`` must never decrease."""
        self.now = now
        self._happens(event)
        if self.sides and not self.ending:
            ending.end_others(self, spare=self.sides.first.rank)
        self.actions += self.rounds.look(now)
        if not self.running:
            ending.finish(self)
        actions, self.actions = self.actions, []
        return actions

    def _happens(self, event: events.Event) -> None:
        match event:
            case events.AgentSaid(rank, message):
                agents.said(self, self.ranks[rank], message)
            case events.AgentConnected(rank, hello, here):
                agents.connected(self, self.ranks[rank], hello, here)
            case events.AgentIsBack(rank):
                self.heartbeats.heard(self.ranks[rank], self.now)
                self.log(rank, "connected_again", {})
            case events.AgentDisconnected(rank, error):
                agents.disconnected(self, self.ranks[rank], error)
            case events.ProcessSaid(data):
                self.processes.heard(data)
                launch.look_for_a_failed_start(self)
                launch.look_for_lost_hosts(self)
            case events.ProcessEnded(number, code):
                launch.process_ended(self, number, code)
            case events.StartFailed(number, error):
                failed = self.ranks[number]
                ending.mark_failed(self, failed, Cause(Kind.REFUSED, host=failed.host, detail=error))
            case events.NotStarted(first):
                launch.not_started(self, first)
            case events.UserSignal(number):
                ending.interrupt(self, number)
            case events.DumpWanted(native):
                running = (each.rank for each in self.ranks if each.state is RankState.RUNNING)
                self.actions += self.rounds.ask(running, native, self.now)
            case events.Tick(terminal_full):
                self._tick(terminal_full)

    def _tick(self, terminal_full: bool) -> None:
        asleep, self.looked_at = self.now - self.looked_at, self.now
        if asleep > self.watching.heartbeat_timeout / 2:
            self._forgive(asleep)
        elif terminal_full:
            self.heartbeats.forgive(asleep, self.now)
            self.stalls.forgive(asleep, self.now)
        agents.about_stalls(self, self.stalls.look(self.now))
        agents.look_for_silence(self)
        launch.look_for_the_missing(self)
        for rank in self.clocks.due(self.now):
            agents.ask_time(self, rank)
        ending.look(self)
        launch.look(self)
        starting = bool(self.arrivals) and not self.ending
        for line in (*self.notes.take(self.now, starting=starting), *self.failures.take(self.now)):
            self.tell(line)
        self.actions.append(events.ShowStatus(self._status()))

    def _forgive(self, asleep: float) -> None:
        """Move all deadlines by ``asleep`` seconds, in which the launcher was stopped and heard nobody."""
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
        """Return the attempt's outcome after the clean-up.  ``waited`` names what the clean-up waited for."""
        return ending.outcome(self, now, waited)

    # ---- what the loop reads

    @property
    def wake_at(self) -> float | None:
        """When the next tick is due, if nothing happens before; None if nothing is due."""
        moments = [self.give_up_at, self.rounds.due]
        if self.spared:
            moments.append(self.spared[1])
        if not self.ending:
            moments.append(self.stalls.wake_at)
        if self.sides and not self.ending:
            moments.append(self.sides.due)
        if self.processes.ended_at is not None and not self.ranks_end_by_themselves:
            moments.append(self.processes.ended_at + SETTLE)
        if self.may_be_missing:
            moments.append(self.arrivals.wake_at)
        return min((moment for moment in moments if moment is not None), default=None)

    def stalled(self, now: float) -> str:
        """Describe the reported stall that the job is in; empty if it is in none."""
        return "" if self.ending else self.stalls.stalled(now)

    @property
    def untidy(self) -> list[Rank]:
        """Ranks whose agent hasn't confirmed that none of their processes is left."""
        return [rank for rank in self.ranks if not rank.tidy]

    @property
    def failed(self) -> bool:
        """Whether any rank has failed by itself, and no signal to the launcher has ended the job."""
        return self.interrupted is None and any(rank.candidate() for rank in self.ranks)

    @property
    def lost_hosts(self) -> set[str]:
        """Hosts that are silent, or that the batch system reports as failed."""
        return {rank.host for rank in self.ranks if rank.failed and rank.failed.kind == kinds.NODE_LOST}
