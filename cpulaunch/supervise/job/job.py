"""A job as a state machine: it takes events and returns actions.

Pure: each event comes with its time.  The loop (``supervise.attempts.loop``) turns sockets, processes and
signals into events, and carries out the actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from cpulaunch.cause import Cause, Kind
from cpulaunch.supervise.job import agents, ending, launch
from cpulaunch.supervise.job import outcome as kinds
from cpulaunch.supervise.job.events import (
    Action,
    AgentConnected,
    AgentDisconnected,
    AgentIsBack,
    AgentSaid,
    DumpWanted,
    Event,
    NotStarted,
    ProcessEnded,
    ProcessSaid,
    ShowStatus,
    StartFailed,
    Tick,
    UserSignal,
)
from cpulaunch.supervise.job.outcome import Outcome
from cpulaunch.supervise.job.processes import SETTLE
from cpulaunch.supervise.job.rank import Rank
from cpulaunch.supervise.job.state import State, Watching
from cpulaunch.supervise.job.status import status_line


class JobState:
    """One attempt of a job, from the start of its processes to its outcome.

    ``handle`` takes every event.  A ``Tick`` is due every ``tick_period`` seconds, and at ``wake_at`` at the
    latest.  Times in logs and outcomes count from ``began``, the start of the job's first attempt.  The cost
    of an event or a tick doesn't grow with the number of ranks to which nothing has happened.
    """

    def __init__(self, watching: Watching, now: float, began: float | None = None) -> None:
        self._state = State(watching, now, now if began is None else began)
        self.tick_period = min(1.0, watching.heartbeat_timeout / 6)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return the actions for ``event``, in order.  ``now`` must never decrease."""
        state = self._state
        state.now = now
        self._happens(event)
        if state.sides and not state.ending:
            ending.end_others(state, spare=state.sides.first.rank)
        state.actions += state.rounds.look(now)
        if not state.running:
            ending.finish(state)
        actions, state.actions = state.actions, []
        return actions

    def _happens(self, event: Event) -> None:
        state = self._state
        match event:
            case AgentSaid():
                agents.said(state, state.ranks[event.rank], event.message)
            case AgentConnected():
                agents.connected(state, state.ranks[event.rank], event.hello, event.here)
            case AgentIsBack():
                agents.is_back(state, state.ranks[event.rank])
            case AgentDisconnected():
                agents.disconnected(state, state.ranks[event.rank], event.error)
            case ProcessSaid():
                state.processes.heard(event.data)
                launch.look_for_a_failed_start(state)
                launch.look_for_lost_hosts(state)
            case ProcessEnded():
                launch.process_ended(state, event.number, event.code)
            case StartFailed():
                rank = state.ranks[event.number]
                cause = Cause(Kind.REFUSED, host=rank.host, detail=event.error)
                ending.mark_failed(state, rank, cause)
            case NotStarted():
                launch.not_started(state, event.first)
            case UserSignal():
                ending.interrupt(state, event.number)
            case DumpWanted():
                agents.ask_for_dumps(state, event.native)
            case Tick():
                self._tick(event.terminal_full)

    def _tick(self, terminal_full: bool) -> None:
        state = self._state
        asleep, state.looked_at = state.now - state.looked_at, state.now
        if asleep > state.watching.heartbeat_timeout / 2:
            self._forgive(asleep)
        elif terminal_full:
            state.heartbeats.forgive(asleep, state.now)
            state.stalls.forgive(asleep, state.now)
        agents.about_stalls(state, state.stalls.look(state.now))
        agents.look_for_silence(state)
        launch.look_for_the_missing(state)
        for rank in state.clocks.due(state.now):
            agents.ask_time(state, rank)
        ending.look(state)
        launch.look(state)
        starting = bool(state.arrivals) and not state.ending
        for line in (*state.notes.take(state.now, starting=starting), *state.failures.take(state.now)):
            state.tell(line)
        state.actions.append(ShowStatus(self._status()))

    def _forgive(self, asleep: float) -> None:
        """Move all deadlines by ``asleep`` seconds, in which the launcher was stopped and heard nobody."""
        state = self._state
        state.heartbeats.forgive(asleep, state.now)
        state.arrivals.forgive(asleep, state.now)
        state.stalls.forgive(asleep, state.now)
        if state.give_up_at is not None:
            state.give_up_at += asleep

    def _status(self) -> str:
        state = self._state
        since_output = None if state.output_at is None else state.now - state.output_at
        steps = state.telemetry.summary() or (f"step {state.steps}" if state.steps else "")
        return status_line(state.up, state.now - state.began, state.watching.restarts, steps, since_output)

    def outcome(self, now: float, waited: Sequence[str] = ()) -> Outcome:
        """Return the attempt's outcome after the clean-up.  ``waited`` names what the clean-up waited for."""
        return ending.outcome(self._state, now, waited)

    # ---- what the loop reads

    @property
    def wake_at(self) -> float | None:
        """When the next tick is due, if nothing happens before; None if nothing is due."""
        state = self._state
        moments = [state.spared[1]] if state.spared else []
        if state.give_up_at is not None:
            moments.append(state.give_up_at)
        if not state.ending and state.stalls.wake_at is not None:
            moments.append(state.stalls.wake_at)
        if state.sides and not state.ending:
            moments.append(state.sides.due)
        if (round_due := state.rounds.due) is not None:
            moments.append(round_due)
        if state.processes.ended_at is not None and not state.ranks_end_by_themselves:
            moments.append(state.processes.ended_at + SETTLE)
        if state.may_be_missing and state.arrivals.wake_at is not None:
            moments.append(state.arrivals.wake_at)
        return min(moments, default=None)

    @property
    def ranks(self) -> list[Rank]:
        return self._state.ranks

    @property
    def ending(self) -> bool:
        """Whether the ranks are being ended."""
        return self._state.ending

    @property
    def finished(self) -> bool:
        """Whether no rank is left."""
        return self._state.finished

    def stalled(self, now: float) -> str:
        """Describe the reported stall that the job is in; empty if it is in none."""
        return "" if self.ending else self._state.stalls.stalled(now)

    @property
    def stated_rates(self) -> str:
        """The sums of the rates that programs have printed, in words; empty if there are none."""
        return self._state.metrics.rates()

    @property
    def user_signals(self) -> int:
        """The number of signals that the launcher got."""
        return self._state.user_signals

    @property
    def untidy(self) -> list[Rank]:
        """Ranks whose agent hasn't confirmed that none of their processes is left."""
        return [rank for rank in self.ranks if not rank.tidy]

    @property
    def failed(self) -> bool:
        """Whether any rank has failed by itself, and no signal to the launcher has ended the job."""
        return self._state.interrupted is None and any(rank.candidate() for rank in self.ranks)

    @property
    def lost_hosts(self) -> set[str]:
        """Hosts that are silent, or that the batch system reports as failed."""
        return {rank.host for rank in self.ranks if rank.failed and rank.failed.kind == kinds.NODE_LOST}
