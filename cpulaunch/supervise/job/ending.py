"""End an attempt: why it ends, how its ranks are ended, and its outcome.  Pure."""

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
from cpulaunch.supervise.job.rank import Rank, RankState, attempt_outcome, slow_endings
from cpulaunch.supervise.job.sentences import sentence
from cpulaunch.supervise.job.state import State
from cpulaunch.supervise.stalls.mismatch import explain_leavers


def interrupt(state: State, number: int) -> None:
    """Handle a signal to the launcher: the first one ends the ranks, a later one kills them.

    While ranks are being ended for another reason, a first SIGINT is ignored, and other signals kill them.
    """
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
"""Kind of cause → kind of outcome and exit code, for failures that the launcher itself detects.  Other causes
are failed starts or signals."""


def mark_failed(state: State, rank: Rank, cause: Cause, at: float | None = None) -> None:
    """Record a failure that the launcher has detected, and end all ranks.

    ``at`` is when the rank failed; the default is now.
    """
    failure = Failure(rank.rank, rank.host, error=sentence(cause), cause=cause)
    kind, code = _ENDS.get(cause.kind, (kinds.START_FAILED, HostError.exit_code))
    if cause.signal is not None:
        kind, code = kinds.SIGNAL, 128 + cause.signal
    rank.failed = Candidate(state.now if at is None else at, kind, code, failure)
    end_ranks(state, SIGTERM)


def lose(state: State, rank: Rank) -> None:
    """Mark a rank as lost because its host is silent."""
    state.move(rank, RankState.LOST)
    silence = round(state.now - rank.last_message_at, 3)
    mark_failed(
        state, rank, Cause(Kind.HOST_LOST, rank.rank, rank.host, seconds=silence), rank.last_message_at
    )


def end_others(state: State, spare: int | None = None) -> None:
    """End the other ranks after a failure, once they have reported their calls, if that was requested."""
    if state.calls is None or state.calls.is_over(state.now):
        end_ranks(state, SIGTERM, spare)


def end_ranks(state: State, number: int, spare: int | None = None) -> None:
    """End all ranks except ``spare``, which is expected to end by itself.

    Ignored if the ranks are already being ended, unless the signal is SIGKILL.
    """
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


def check_deadlines(state: State) -> None:
    """End the spared rank, and give up waiting for ranks, once the deadlines for that have passed."""
    if state.spared and state.end and state.now >= state.spared[1]:
        state.send(state.ranks[state.spared[0]], state.end)
        state.spared = None
    if state.give_up_at is not None and state.now >= state.give_up_at:
        _give_up(state)


def _give_up(state: State) -> None:
    """Stop waiting for ranks that did not end: mark the silent ones as lost, the others as killed."""
    state.give_up_at = None
    for rank in state.silent(state.missed_beat):
        lose(state, rank)
    for rank in state.ranks:
        if not rank.state.final:
            state.move(rank, RankState.KILLED_BY_LAUNCHER)


def timing(state: State, stall: Stall) -> dict[str, Any]:
    """Return the stall's time in seconds after the job's start (``at``), and its ``attempt``."""
    return {"at": round(stall.at - state.began, 1), "attempt": state.watching.restarts + 1}


def finish(state: State) -> None:
    if not state.finished:
        state.finished = True
        for line in (*state.notes.take_all(), *state.failures.take_all()):
            state.tell(line)
        killed = [rank.rank for rank in state.ranks if rank.state is RankState.KILLED_BY_LAUNCHER]
        if killed and state.end and state.end.signal != SIGKILL:
            names, grace = state.watching.names, state.watching.grace_period
            were = "were" if len(killed) > 1 else "was"
            state.tell(f"{names.several(killed)} had not ended after {grace:g} s and {were} killed")
        state.actions.append(Finish())


def outcome(state: State, now: float, waited: Sequence[str] = ()) -> Outcome:
    """Return the attempt's outcome, after the clean-up.  ``waited`` lists slow parts of the clean-up."""
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
        if state.calls:
            first = state.calls.add_note(first)
        if first.ranks and not first.text and kind != kinds.STALLED:
            first = explain_leavers(first, state.ranks, state.calls)
    elif state.processes.unreached and (code := state.processes.exit_code):
        kind = kinds.EXIT
    ranks = tuple(RankOutcome(r.rank, r.host, r.pid, r.cores, r.status) for r in state.ranks)
    ended_at = now if state.end_at is None else state.end_at
    waited = (*slow_endings(state.ranks, state.end_at, state.watching.names), *waited)
    attempt = attempt_outcome(state.ranks, kind, now - state.started, ended_at - state.started, waited)
    stalls = tuple(replace(each, **timing(state, each)) for each in state.stalls.stalls)
    by_signal = state.interrupted is not None or bool(first and cause and cause.by_signal)
    return Outcome(
        code, kind, now - state.began, first, ranks, stalls=stalls, attempts=(attempt,),
        metrics=state.metrics.summary(), by_signal=by_signal,
    )  # fmt: skip


def _is_over(state: State, failure: Candidate) -> bool:
    """Whether the failure is a stall, but all stalled programs then exited with code 0."""
    mine = [rank for rank in state.ranks if not state.watching.independent or rank.failed is failure]
    return failure.kind == kinds.STALLED and all(
        rank.exit and rank.exit.code == 0 and rank.exit.own for rank in mine
    )


def _as_cancelled(state: State, cause: Candidate) -> Failure:
    """Return the failure.  If the batch system cancelled the job, the cancellation is its cause."""
    if cause.failure.signal in (SIGTERM, SIGKILL) and (why := state.processes.cancellation):
        return replace(cause.failure, error=why, note=None, cause=Cause(Kind.CANCELLED, detail=why))
    return cause.failure


def _has_saved(state: State) -> bool:
    """Whether the program has saved its state on a signal, and then ended."""
    failures = {found.exit_code for rank in state.ranks if (found := rank.candidate())}
    return any(rank.saved for rank in state.ranks) and failures <= {SAVED_EXIT_CODE}
