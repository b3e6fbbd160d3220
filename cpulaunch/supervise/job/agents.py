"""Handle the messages of the ranks' agents.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from signal import SIGKILL, SIGTERM

from cpulaunch import messages, wire
from cpulaunch.cause import Cause, Kind
from cpulaunch.errors import STALLED_EXIT_CODE
from cpulaunch.messages import KINDS, AgentMessage, Unknown
from cpulaunch.supervise.job import ending, launch
from cpulaunch.supervise.job import outcome as kinds
from cpulaunch.supervise.job.causes import Candidate
from cpulaunch.supervise.job.events import Action, ActOnStall, HideStderr, Record, ReportStall, Write
from cpulaunch.supervise.job.outcome import Failure
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.supervise.job.sentences import sentence
from cpulaunch.supervise.job.state import State
from cpulaunch.supervise.stalls.mismatch import Sides, aborted_by_gloo, is_about_others

STDOUT = 1
"""The stream number of stdout in ``Output``."""

NOTHING_LOADED = (
    "neither cpulaunch.Checkpoint nor the Trainer or accelerate has loaded a saved state: unless the script "
    "has loaded its own, it starts from the beginning"
)
"""Warning for a restarted job whose ranks make steps without having loaded a state."""


def connected(state: State, rank: Rank, hello: messages.Hello, here: bool) -> None:
    state.arrivals.arrived(rank, state.now)
    if not rank.state.final:
        state.heartbeats.expect(rank, state.now)
    if not here:
        rank.clock = state.now - hello.at  # until its clock is measured
        ask_time(state, rank)
    entry = hello._asdict()
    for name in ("rank", "salt", "proof"):
        del entry[name]
    state.log(rank.rank, "hello", entry)
    if hello.version != messages.VERSION:
        # The loop closes the connection, and the agent then ends its program.
        state.move(rank, RankState.FAILED_TO_START)
        versions = f"version {hello.version} of the control protocol, the launcher version {messages.VERSION}"
        ending.mark_failed(state, rank, Cause(Kind.VERSIONS_DIFFER, host=rank.host, detail=versions))
    elif state.end:
        state.send(rank, state.end)  # it was sent before this agent connected


def said(state: State, rank: Rank, message: AgentMessage | Unknown) -> None:
    state.heartbeats.heard(rank, state.now)
    match message:
        case messages.Dump():
            state.inquiry.answered(rank.rank, message, state.now)
            about_stalls(state, state.stalls.answered(rank, state.now))
        case messages.Beat():
            _beats(state, rank, message)
        case messages.Steps():
            if rows := state.telemetry.heard(rank, message):
                state.actions.append(Record(rows))
        case messages.Output(stream, data):
            _printed(state, rank, stream, wire.unpack(data))
        case messages.TracePiece():
            pass
        case messages.Time(at):
            state.clocks.learn(rank, at, state.now)
        case Unknown(kind):
            state.log(rank.rank, kind, {"unknown": True})
            if kind not in state.unknown:
                state.unknown.add(kind)
                name = state.watching.names.one(rank.rank)
                state.tell(f"{rank.host}: the agent of {name} sent an unknown kind of message, {kind!r}")
        case _:
            state.log(rank.rank, KINDS[type(message)], message._asdict())
            _goes_through(state, rank, message)


def _beats(state: State, rank: Rank, beat: messages.Beat) -> None:
    rank.beats(beat, state.now)
    if beat.steps and not state.steps and state.watching.restarts and rank.resumed_from is None:
        state.tell(NOTHING_LOADED)
    state.steps = max(state.steps, beat.steps)
    if state.clocks.outdated(rank, state.now):
        ask_time(state, rank)
    about_stalls(state, state.stalls.beat(rank, beat, state.now))


def _printed(state: State, rank: Rank, stream: int, data: bytes) -> None:
    state.output_at = state.now
    about_stalls(state, state.stalls.progressed(rank, state.now))
    state.actions.append(Write(rank.rank, stream, data))
    if stream == STDOUT:
        _note_problems(state, rank, state.metrics.feed(rank.rank, data))


def _note_problems(state: State, rank: Rank, problems: Iterable[str]) -> None:
    for problem in problems:
        state.notes.add(rank, f"{state.watching.names.one(rank.rank)}{problem}", state.now)


def _goes_through(state: State, rank: Rank, message: AgentMessage) -> None:
    """Handle the messages that are rare and may change the rank's state."""
    match message:
        case messages.Started(pid, cores):
            rank.pid, rank.cores = pid, cores
            state.move(rank, RankState.RUNNING)
            about_stalls(state, state.stalls.progressed(rank, state.now))
            for note in message.notes:
                state.notes.add(rank, note, state.now)
        case messages.Note(note):
            state.notes.add(rank, note, state.now)
        case messages.Resumed(step):
            rank.resumed_from = step
        case messages.Saved():
            rank.saved = rank.saved or message.leaves
            rank.has_made(message.step - (rank.resumed_from or 0))
        case messages.Failure():
            _raised(state, rank, message)
        case messages.Refused(error):
            rank.tidy = True
            state.move(rank, RankState.FAILED_TO_START)
            ending.mark_failed(state, rank, Cause(Kind.REFUSED, host=rank.host, detail=error))
            state.send(rank, messages.Release())
        case messages.Exit():
            _exited(state, rank, message)
            state.send(rank, messages.Release())


def _raised(state: State, rank: Rank, raised: messages.Failure) -> None:
    rank.raises(raised)
    # The traceback is shown at the end if this failure is the root cause.
    state.actions.append(HideStderr(rank.rank))
    if rank.cause.kind is Kind.HOST_SILENT:  # the host may be back before we would count it as lost
        for silent in state.silent(state.two_beats):
            ending.lose(state, silent)
    elif is_about_others(rank.cause):
        _ask_for_sides(state, rank)
    # Don't wait until the program has printed its traceback and exited.
    if not state.watching.go_on:
        ending.end_others(state, spare=rank.rank)


def ask_time(state: State, rank: Rank) -> None:
    rank.asked_at = state.now
    state.send(rank, messages.AskTime())


def _exited(state: State, rank: Rank, end: messages.Exit) -> None:
    rank.tidy = True
    rank.exit = end
    if end.signal is None:  # a signal may have ended it in the middle of a line
        _note_problems(state, rank, state.metrics.finish(rank.rank))
    if not end.own and end.code != 0:
        killed = end.signal == SIGKILL and state.grace_is_over
        state.move(rank, RankState.KILLED_BY_LAUNCHER if killed else RankState.ENDED_BY_LAUNCHER)
    else:
        state.move(rank, RankState.EXITED if end.signal is None else RankState.SIGNALED)
    if rank.candidate():
        launch.blame(state)
        if aborted_by_gloo(end):  # ask before the others notice that its connections are closed
            _ask_for_sides(state, rank)
        _program_failed(state, rank)
    about_stalls(state, state.stalls.ended(rank, state.now))


def _program_failed(state: State, rank: Rank) -> None:
    """End the other ranks, or report the failure if they go on."""
    if not state.watching.go_on:
        ending.end_others(state)
    elif not state.ending and (found := rank.candidate()):
        why = found.failure.summary
        if found.kind == kinds.STALLED:
            why = found.failure.of(f"{state.watching.names.one(rank.rank)} on {rank.host}")
        state.failures.add(rank, why, state.now)


def _ask_for_sides(state: State, first: Rank) -> None:
    if not state.watching.independent and not state.sides and not state.ending:
        state.sides = Sides(state.ranks, first, state.now, state.inquiry)
        state.actions += state.sides.asked


def disconnected(state: State, rank: Rank, error: str) -> None:
    if rank.state.final:
        return
    if state.ending:
        state.move(rank, RankState.ENDED_BY_LAUNCHER)
        return
    state.move(rank, RankState.LOST)
    if error:
        ending.mark_failed(state, rank, Cause(Kind.AGENT_MALFORMED, host=rank.host, detail=error))
        return
    # The kernel closed the connection, so the agent has died while its host is alive.
    cause = Cause(Kind.AGENT_KILLED, host=rank.host)
    failure = Failure(rank.rank, rank.host, signal=int(SIGKILL), error=sentence(cause), cause=cause)
    rank.failed = Candidate(state.now, kinds.SIGNAL, 128 + SIGKILL, failure)
    launch.blame(state)
    if state.watching.go_on:
        _program_failed(state, rank)
    else:
        ending.end_ranks(state, SIGTERM)


def look_for_silence(state: State) -> None:
    lost = {rank.host for rank in state.silent(state.longest_silence)}
    for rank in state.silent(state.two_beats) if lost else ():
        if rank.host in lost:  # the other ranks of a lost host may reach the timeout a moment later
            ending.lose(state, rank)


def about_stalls(state: State, actions: Sequence[Action]) -> None:
    if state.ending:
        return
    state.actions += [action for action in actions if not isinstance(action, ActOnStall)]
    for action in actions:
        if isinstance(action, ReportStall):
            fields = asdict(replace(action.stall, **ending.when(state, action.stall)))
            first = None if action.explanation.mutual else next(iter(action.stall.ranks), None)
            state.log(first, "stall", {"lasted": fields.pop("seconds"), **fields})
        elif isinstance(action, ActOnStall):
            _end_stalled(state, action)


def _end_stalled(state: State, action: ActOnStall) -> None:
    stall, explanation = action
    first = None if explanation.mutual else next(iter(stall.ranks), None)
    cause = Cause(
        Kind.STALLED,
        first,
        None if first is None else stall.host,
        operation=stall.operation,
        sequence=stall.sequence,
        seconds=stall.seconds,
        detail=stall.text,
    )
    failure = Failure(
        first,
        None if first is None else stall.host,
        error=sentence(cause),
        cause=cause,
        file=None if explanation.mutual else stall.file,
        line=None if explanation.mutual else stall.line,
        note="\n".join(explanation.lines) or None,
        disagree=explanation.disagree,
        ranks=stall.ranks,
        advice=explanation.advice or None,
    )
    # If no rank is to blame, rank 0 holds the failure.
    rank = state.ranks[first or 0]
    rank.failed = Candidate(state.now, kinds.STALLED, STALLED_EXIT_CODE, failure)
    left = [each for each in state.ranks if not each.state.final]
    if all(each.beat and each.beat.leaving for each in left):
        which = state.watching.names.several(each.rank for each in left)
        state.tell(f"ending {which}, of which the scripts have finished: what keeps them running is cut off")
    if state.watching.go_on:
        state.send(rank, messages.End(int(SIGTERM), state.watching.grace_period, failed=True))
    else:
        ending.end_ranks(state, SIGTERM)
