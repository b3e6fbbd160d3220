"""How an attempt ends: what ends it, how its ranks are ended, and what comes of it; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

from cpulaunch import messages
from cpulaunch.cause import Cause, Kind
from cpulaunch.errors import NODE_LOST_EXIT_CODE, SAVED_EXIT_CODE, HostError
from cpulaunch.supervise.job import outcome as kinds
from cpulaunch.supervise.job.causes import Candidate, root_cause
from cpulaunch.supervise.job.events import EndProcesses, Finish
from cpulaunch.supervise.job.outcome import Failure, Outcome, RankOutcome, Stall, signal_name
from cpulaunch.supervise.job.processes import SETTLE
from cpulaunch.supervise.job.rank import Rank, RankState, attempt_outcome, slow_to_end
from cpulaunch.supervise.job.sentences import sentence
from cpulaunch.supervise.job.state import State
from cpulaunch.supervise.stalls.mismatch import behind_others


def interrupt(state: State, number: int) -> None:
    """The launcher got a signal."""
    state.user_signals += 1
    if state.user_signals == 1 and not state.ending:
        state.interrupted = number
        everything = f"all {state.watching.names.noun}s, {state.watching.grace_period} s at most"
        state.tell(f"{signal_name(number)}: ending {everything}; send it again to kill them now")
        end_ranks(state, number)
    elif state.user_signals > 1 or number != SIGINT:
        end_ranks(state, SIGKILL)


_ENDS = {
    Kind.HOST_LOST: (kinds.NODE_LOST, NODE_LOST_EXIT_CODE),
    Kind.HOST_FAILED: (kinds.NODE_LOST, NODE_LOST_EXIT_CODE),
    Kind.AGENT_MALFORMED: (kinds.ERROR, 1),
}
"""What causes that the launcher sees itself make of a job; others are failed starts, or signals."""


def mark_failed(state: State, rank: Rank, cause: Cause, at: float | None = None) -> None:
    """The rank has failed, though its agent doesn't say so itself."""
    failure = Failure(rank.rank, rank.host, error=sentence(cause), cause=cause)
    kind, code = _ENDS.get(cause.kind, (kinds.START_FAILED, HostError.exit_code))
    if cause.signal is not None:
        kind, code = kinds.SIGNAL, 128 + cause.signal
    rank.failed = Candidate(state.now if at is None else at, kind, code, failure)
    end_ranks(state, SIGTERM)


def lose(state: State, rank: Rank) -> None:
    """Its host has fallen silent."""
    state.move(rank, RankState.LOST)
    silence = round(state.now - rank.heard_at, 3)
    mark_failed(state, rank, Cause(Kind.HOST_LOST, rank.rank, rank.host, seconds=silence), rank.heard_at)


def end_others(state: State, spare: int | None = None) -> None:
    """A rank has failed: end the others, once they have said where they are if it may be about them."""
    if state.sides is None or state.sides.over(state.now):
        end_ranks(state, SIGTERM, spare)


def end_ranks(state: State, number: int, spare: int | None = None) -> None:
    """End all ranks but ``spare``, which ends by itself.  Once is enough, but for SIGKILL."""
    if state.ending and number != SIGKILL:
        return
    grace = state.watching.grace_period
    state.end_at = state.now if state.end_at is None else state.end_at
    state.stalls.end()
    state.end = messages.End(int(number), grace, failed=state.interrupted is None)
    for rank in state.ranks:
        if rank.rank != spare:
            state.send(rank, state.end)
    if spare is not None:
        state.spared = spare, state.now + SETTLE
    give_up_at = state.now + (0 if number == SIGKILL else grace) + 2 * SETTLE
    state.give_up_at = min(give_up_at, state.give_up_at or give_up_at)
    if state.arrivals.none_yet:
        state.actions.append(EndProcesses())


def look(state: State) -> None:
    """Whose time is up now?"""
    if state.spared and state.end and state.now >= state.spared[1]:
        state.send(state.ranks[state.spared[0]], state.end)
        state.spared = None
    if state.give_up_at is not None and state.now >= state.give_up_at:
        _give_up(state)


def _give_up(state: State) -> None:
    """Ranks that are still there don't hear us."""
    state.give_up_at = None
    for rank in state.silent(state.two_beats):
        lose(state, rank)
    for rank in state.ranks:
        if not rank.state.final:
            state.move(rank, RankState.KILLED_BY_LAUNCHER)


def when(state: State, stall: Stall) -> dict[str, Any]:
    """Seconds after the job's start at which it began, and in which attempt."""
    return {"at": round(stall.at - state.began, 1), "attempt": state.watching.restarts + 1}


def finish(state: State) -> None:
    """No rank is left."""
    if not state.finished:
        state.finished = True
        for line in (*state.notes.take_all(), *state.failures.take_all()):
            state.tell(line)
        state.actions.append(Finish())


def outcome(state: State, now: float, waited: Sequence[str] = ()) -> Outcome:
    """How the job has ended, once all is cleaned up, for which it has ``waited``."""
    for rank in state.ranks:
        if rank.state is RankState.NOT_STARTED:
            state.move(rank, RankState.FAILED_TO_START)
        elif not rank.state.final:
            state.move(rank, RankState.ENDED_BY_LAUNCHER)
    succeeded = [
        (rank.exit.at + rank.clock, rank.rank)
        for rank in state.ranks
        if rank.exit and rank.exit.code == 0 and rank.exit.own
    ]
    failures = [found for rank in state.ranks if (found := rank.candidate()) and not _is_over(state, found)]
    cause = root_cause(failures, succeeded, independent=state.watching.independent)
    kind, code, first = kinds.OK, 0, None
    if _has_saved(state):
        kind, code = kinds.INTERRUPTED, SAVED_EXIT_CODE
    elif state.interrupted is not None:
        kind, code = kinds.INTERRUPTED, 128 + state.interrupted
    elif cause:
        kind, code, first = cause.kind, cause.exit_code, _as_cancelled(state, cause)
        if state.sides:
            first = state.sides.noted(first)
        if first.ranks and not first.text and kind != kinds.STALLED:
            first = behind_others(first, state.ranks, state.sides)
    elif state.processes.unreached and (code := state.processes.exit_code):
        kind = kinds.EXIT
    ranks = tuple(RankOutcome(r.rank, r.host, r.pid, r.cores, r.status) for r in state.ranks)
    ended_at = now if state.end_at is None else state.end_at
    waited = (*slow_to_end(state.ranks, state.end_at, state.watching.names), *waited)
    attempt = attempt_outcome(state.ranks, kind, now - state.started, ended_at - state.started, waited)
    stalls = tuple(replace(each, **when(state, each)) for each in state.stalls.stalls)
    told = state.interrupted is not None or bool(first and cause and cause.by_signal)
    return Outcome(
        code, kind, now - state.began, first, ranks, stalls=stalls, attempts=(attempt,),
        metrics=state.metrics.summary(), told=told,
    )  # fmt: skip


def _is_over(state: State, failure: Candidate) -> bool:
    """Whether it is a stall of programs that have all ended with exit code 0, or said that they would."""
    mine = [rank for rank in state.ranks if not state.watching.independent or rank.failed is failure]
    return failure.kind == kinds.STALLED and all(
        rank.exit and rank.exit.code == 0 and rank.exit.own for rank in mine
    )


def _as_cancelled(state: State, cause: Candidate) -> Failure:
    """What a batch system has ended can't say so, or says only by which signal."""
    if cause.failure.signal in (SIGTERM, SIGKILL) and (why := state.processes.cancellation):
        return replace(cause.failure, error=why, note=None, cause=Cause(Kind.CANCELLED, detail=why))
    return cause.failure


def _has_saved(state: State) -> bool:
    """Whether a signal has ended the program, which has saved its state before."""
    failures = {found.exit_code for rank in state.ranks if (found := rank.candidate())}
    return any(rank.saved for rank in state.ranks) and failures <= {SAVED_EXIT_CODE}
