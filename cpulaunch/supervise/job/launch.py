"""Handle output and the end of the launcher's own processes, and ranks that don't arrive.  Pure."""

from __future__ import annotations

from cpulaunch.cause import Cause, Kind
from cpulaunch.supervise.job import ending
from cpulaunch.supervise.job import outcome as kinds
from cpulaunch.supervise.job.outcome import Failure
from cpulaunch.supervise.job.processes import SETTLE
from cpulaunch.supervise.job.rank import RankState
from cpulaunch.supervise.job.sentences import sentence
from cpulaunch.supervise.job.state import State


def check_failed_start(state: State, *, ended: bool = False) -> None:
    """Look for a failed start of a rank in the output of the launcher's processes."""
    if not state.arrivals or (found := state.processes.start_failure(ended=ended)) is None:
        return
    rank = state.arrivals.first(found.host)
    if rank.failed is None:
        cause = Cause(Kind.NOT_STARTED, host=found.host or None, detail=found.why)
        ending.mark_failed(state, rank, cause, state.started)


def check_lost_hosts(state: State) -> None:
    """Mark ranks on hosts that the batch system reports as failed.

    The batch system notices a failed host before our timeout, and ends the processes on the other hosts.
    """
    for host in state.processes.lost_hosts:
        for rank in state.ranks:
            if rank.host == host and (rank.failed is None or rank.failed.kind != kinds.NODE_LOST):
                ending.mark_failed(state, rank, Cause(Kind.HOST_FAILED, host=host), state.started)


def handle_process_end(state: State, number: int, code: int) -> None:
    state.processes.end(number, code, state.now)
    if state.watching.launcher.agents_are_children:
        state.arrivals.agent_ended(number, state.now)
    blame_mpiexec(state)


def blame_mpiexec(state: State) -> None:
    """Blame a killed mpiexec for the end of the agents that ended with it."""
    signal = state.processes.killed_by
    if signal is None or state.watching.launcher.agents_are_children:
        return
    mpiexec = state.watching.command.rpartition("/")[2]
    for rank in state.ranks:
        found = rank.candidate()
        if not found or state.now > found.at + SETTLE:
            continue
        if found.by_signal or found.failure.cause.kind is Kind.AGENT_KILLED:
            cause = Cause(Kind.LAUNCHER_KILLED, rank.rank, program=mpiexec, signal=signal)
            failure = Failure(rank.rank, rank.host, signal=signal, error=sentence(cause), cause=cause)
            rank.failed = found._replace(exit_code=128 + signal, failure=failure)


def handle_not_started(state: State, first: int) -> None:
    for rank in state.ranks[first:]:
        rank.tidy = True
        state.arrivals.expect_no_more(rank)
        state.move(rank, RankState.FAILED_TO_START)
    state.processes.limit_count(first, state.now)


def check_processes(state: State) -> None:
    """Finish the attempt once the launcher's processes have ended.

    It has failed if ranks are left.  Only ranks that outlive the launcher's processes can still report.
    """
    ended_at = state.processes.ended_at
    if ended_at is None or state.now < ended_at + SETTLE:
        return
    if not state.ending:
        check_failed_start(state, ended=True)
    if not state.ending:
        _handle_early_end(state)
    if not state.ranks_end_by_themselves:
        ending.finish(state)


def _handle_early_end(state: State) -> None:
    there = [rank for rank in state.ranks if not rank.state.final]
    if state.processes.unreached:
        for rank in there:
            state.move(rank, RankState.NOT_WATCHED)
    elif there and (signal := state.processes.killed_by) and state.watching.launcher.ranks_outlive_it:
        mpiexec = state.watching.command.rpartition("/")[2]
        ending.mark_failed(state, there[0], Cause(Kind.LAUNCHER_KILLED, program=mpiexec, signal=signal))
    elif there:
        cause = Cause(
            Kind.LAUNCHER_ENDED,
            program=state.watching.command,
            exit_code=state.processes.exit_code,
            detail=f"{len(there)} of {len(state.ranks)} ranks",
        )
        ending.mark_failed(state, there[0], cause)


def check_arrivals(state: State) -> None:
    """Fail the start if a rank's agent ended without a ``Hello``, or if its ``Hello`` is overdue."""
    if not state.may_be_missing:
        return
    if rank := state.arrivals.without_agent(state.now):
        state.move(rank, RankState.FAILED_TO_START)
        ending.mark_failed(state, rank, Cause(Kind.AGENT_ENDED, host=rank.host))
        return
    timeout = state.watching.heartbeat_timeout
    if state.arrivals.overdue(timeout, state.now):
        rank = state.arrivals.first()
        ending.mark_failed(state, rank, Cause(Kind.AGENT_SILENT, host=rank.host, seconds=timeout))
