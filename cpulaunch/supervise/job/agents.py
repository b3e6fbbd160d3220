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
from cpulaunch.supervise.stalls.mismatch import Calls, aborted_by_gloo, is_about_others

STDOUT = 1

NOTHING_LOADED = (
    "no saved state was loaded by cpulaunch.Checkpoint, the Trainer or accelerate: unless the script loads "
    "its own, it starts from the beginning"
)
"""Warning for a restarted job if a rank makes a step, and no state was loaded."""


def handle_connection(state: State, rank: Rank, hello: messages.Hello, here: bool) -> None:
    state.arrivals.arrived(rank, state.now)
    if not rank.state.final:
        state.heartbeats.expect(rank, state.now)
    if not here:
        rank.clock = state.now - hello.at  # an estimate, until the clock is measured
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
        state.send(rank, state.end)  # the other agents have got it already


def handle_message(state: State, rank: Rank, message: AgentMessage | Unknown) -> None:
    state.heartbeats.record(rank, state.now)
    match message:
        case messages.Dump():
            state.inquiry.store_answer(rank.rank, message, state.now)
            add_stall_actions(state, state.stalls.handle_answer(rank, state.now))
        case messages.Beat():
            _handle_beat(state, rank, message)
        case messages.Steps():
            if rows := state.telemetry.add_steps(rank, message):
                state.actions.append(Record(rows))
        case messages.Output(stream, data):
            _handle_output(state, rank, stream, wire.unpack(data))
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
            _handle_rare(state, rank, message)


def _handle_beat(state: State, rank: Rank, beat: messages.Beat) -> None:
    rank.record_beat(beat, state.now)
    if beat.steps and not state.steps and state.watching.restarts and rank.resumed_from is None:
        state.tell(NOTHING_LOADED)
    state.steps = max(state.steps, beat.steps)
    if state.clocks.outdated(rank, state.now):
        ask_time(state, rank)
    add_stall_actions(state, state.stalls.beat(rank, beat, state.now))


def _handle_output(state: State, rank: Rank, stream: int, data: bytes) -> None:
    state.output_at = state.now
    add_stall_actions(state, state.stalls.add_progress(rank, state.now))
    state.actions.append(Write(rank.rank, stream, data))
    if stream == STDOUT:
        _note_problems(state, rank, state.metrics.feed(rank.rank, data))


def _note_problems(state: State, rank: Rank, problems: Iterable[str]) -> None:
    for problem in problems:
        state.notes.add(rank, f"{state.watching.names.one(rank.rank)}{problem}", state.now)


def _handle_rare(state: State, rank: Rank, message: AgentMessage) -> None:
    """Handle a rare message, which may change the rank's state."""
    match message:
        case messages.Started(pid, cores):
            rank.pid, rank.cores = pid, cores
            state.move(rank, RankState.RUNNING)
            add_stall_actions(state, state.stalls.add_progress(rank, state.now))
            for note in message.notes:
                state.notes.add(rank, note, state.now)
        case messages.Note(note):
            state.notes.add(rank, note, state.now)
        case messages.Resumed(step):
            rank.resumed_from = step
        case messages.Saved():
            rank.saved = rank.saved or message.leaves
            rank.record_steps(message.step - (rank.resumed_from or 0))
        case messages.Failure():
            _handle_exception(state, rank, message)
        case messages.Refused(error):
            rank.tidy = True
            state.move(rank, RankState.FAILED_TO_START)
            ending.mark_failed(state, rank, Cause(Kind.REFUSED, host=rank.host, detail=error))
            state.send(rank, messages.Release())
        case messages.Exit():
            _handle_exit(state, rank, message)
            state.send(rank, messages.Release())


def _handle_exception(state: State, rank: Rank, raised: messages.Failure) -> None:
    rank.record_exception(raised)
    # The traceback is shown at the end if this failure is the root cause.
    state.actions.append(HideStderr(rank.rank))
    if rank.cause.kind is Kind.HOST_SILENT:  # don't wait: the host may answer again before its timeout
        for silent in state.silent(state.missed_beat):
            ending.lose(state, silent)
    elif is_about_others(rank.cause):
        _ask_for_calls(state, rank)
    # Don't wait until the program has printed its traceback and exited.
    if not state.watching.go_on:
        ending.end_others(state, spare=rank.rank)


def ask_time(state: State, rank: Rank) -> None:
    rank.asked_at = state.now
    state.send(rank, messages.AskTime())


def _handle_exit(state: State, rank: Rank, end: messages.Exit) -> None:
    rank.tidy = True
    rank.exit = end
    if end.signal is None:  # after a signal, the last line may be incomplete
        _note_problems(state, rank, state.metrics.finish(rank.rank))
    if not end.own and end.code != 0:
        killed = end.signal == SIGKILL and state.grace_is_over
        state.move(rank, RankState.KILLED_BY_LAUNCHER if killed else RankState.ENDED_BY_LAUNCHER)
    else:
        state.move(rank, RankState.EXITED if end.signal is None else RankState.SIGNALED)
    if rank.candidate():
        launch.blame_mpiexec(state)
        if aborted_by_gloo(end):  # ask the other ranks before they fail because of closed connections
            _ask_for_calls(state, rank)
        _handle_program_failure(state, rank)
    add_stall_actions(state, state.stalls.handle_end(rank, state.now))


def _handle_program_failure(state: State, rank: Rank) -> None:
    """End the other ranks, or report the failure if they go on."""
    if not state.watching.go_on:
        ending.end_others(state)
    elif not state.ending and (found := rank.candidate()):
        why = found.failure.summary
        if found.kind == kinds.STALLED:
            why = found.failure.error_after(f"{state.watching.names.one(rank.rank)} on {rank.host}")
        state.failures.add(rank, why, state.now)


def _ask_for_calls(state: State, first: Rank) -> None:
    if not state.watching.independent and not state.calls and not state.ending:
        state.calls = Calls(state.ranks, first, state.now, state.inquiry)
        state.actions += state.calls.requests


def handle_disconnection(state: State, rank: Rank, error: str) -> None:
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
    launch.blame_mpiexec(state)
    if state.watching.go_on:
        _handle_program_failure(state, rank)
    else:
        ending.end_ranks(state, SIGTERM)


def check_silence(state: State) -> None:
    lost = {rank.host for rank in state.silent(state.longest_silence)}
    for rank in state.silent(state.missed_beat) if lost else ():
        if rank.host in lost:  # the other ranks of a lost host may reach the timeout a moment later
            ending.lose(state, rank)


def add_stall_actions(state: State, actions: Sequence[Action]) -> None:
    if state.ending:
        return
    state.actions += [action for action in actions if not isinstance(action, ActOnStall)]
    for action in actions:
        if isinstance(action, ReportStall):
            fields = asdict(replace(action.stall, **ending.timing(state, action.stall)))
            first = None if action.explanation.mutual else next(iter(action.stall.ranks), None)
            state.log(first, "stall", {"lasted": fields.pop("seconds"), **fields})
        elif isinstance(action, ActOnStall):
            _end_stalled(state, action)


def _end_stalled(state: State, action: ActOnStall) -> None:
    stall, explanation = action
    if not explanation.mutual:
        first, host, file, line = next(iter(stall.ranks), None), stall.host, stall.file, stall.line
    else:
        first = host = file = line = None
    cause = Cause(Kind.STALLED, first, host, seconds=stall.seconds, detail=stall.text)
    cause = cause._replace(operation=stall.operation, sequence=stall.sequence)
    failure = Failure(
        first,
        host,
        error=sentence(cause),
        cause=cause,
        file=file,
        line=line,
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
        state.tell(f"ending {which}: the scripts have finished, but the processes do not exit")
    if state.watching.go_on:
        state.send(rank, messages.End(int(SIGTERM), state.watching.grace_period, failed=True))
    else:
        ending.end_ranks(state, SIGTERM)
