"""The launcher's record of one rank, and that rank's failure, if it failed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from cpulaunch import messages
from cpulaunch.cause import EXCEPTION, Cause, Kind
from cpulaunch.model.hosts import fold_hosts
from cpulaunch.model.names import Names
from cpulaunch.supervise.job import outcome as kinds
from cpulaunch.supervise.job.causes import Candidate, cause_of
from cpulaunch.supervise.job.outcome import AttemptOutcome, Failure
from cpulaunch.supervise.job.sentences import sentence


class RankState(Enum):
    """The state of a rank.  A rank never leaves the final states."""

    NOT_STARTED = auto()
    RUNNING = auto()
    FAILED_TO_START = auto()  # or its agent refused to run the program
    EXITED = auto()
    SIGNALED = auto()
    ENDED_BY_LAUNCHER = auto()
    KILLED_BY_LAUNCHER = auto()
    LOST = auto()
    NOT_WATCHED = auto()  # its agent could not reach the launcher

    @property
    def final(self) -> bool:
        """Whether nothing more is expected of the rank."""
        return self not in (RankState.NOT_STARTED, RankState.RUNNING)


_STATUS = {
    RankState.NOT_STARTED: "not started",
    RankState.RUNNING: "running",
    RankState.FAILED_TO_START: "not started",
    RankState.EXITED: "exit {code}",
    RankState.SIGNALED: "signal {signal}",
    RankState.ENDED_BY_LAUNCHER: "ended by launcher",
    RankState.KILLED_BY_LAUNCHER: "killed by launcher",
    RankState.LOST: "lost",
    RankState.NOT_WATCHED: "not watched",
}


@dataclass
class Rank:
    """One rank.  Times are in seconds, on the launcher's clock.

    ``clock`` is the offset to add to its host's time to get the launcher's.  It was measured at
    ``measured_at`` with a round trip of ``round_trip``.  The clock was last requested at ``asked_at``; if the
    answer took too long, the next request follows ``ask_again`` seconds later.

    ``beat`` is the last beat, which came at ``beat_at``.  ``rates`` are steps and collectives per second, up
    to the beat ``rated``.  ``raised`` and ``exit`` are messages of the agent, and ``cause`` is the cause of
    ``raised``.  ``resumed_from`` is the step of the state that the program loaded.  ``saved``: the program
    saved its state and ends.  ``failed`` is a failure that the launcher itself detected.  ``tidy``: the agent
    has confirmed that all processes of the rank have ended.  ``over_at`` is when the rank reached a final
    state.  ``steps`` is the number of optimizer steps so far; None if steps can't be seen.
    """

    rank: int
    host: str
    state: RankState = RankState.NOT_STARTED
    last_message_at: float = 0.0
    clock: float = 0.0
    asked_at: float = inf
    ask_again: float = 0.0
    measured_at: float | None = None
    round_trip: float = 0.0
    beat: messages.Beat | None = None
    beat_at: float = 0.0
    rated: tuple[messages.Beat, float] | None = None
    rates: tuple[float, float] | None = None
    pid: int | None = None
    cores: str | None = None
    raised: messages.Failure | None = None
    cause: Cause = EXCEPTION
    exit: messages.Exit | None = None
    resumed_from: int | None = None
    saved: bool = False
    failed: Candidate | None = None
    tidy: bool = False
    over_at: float | None = None
    steps: int | None = None

    def record_exception(self, message: messages.Failure) -> None:
        """Record the first exception of the program."""
        if self.raised is None:
            self.raised, self.cause = message, cause_of(message)

    def record_steps(self, steps: int) -> None:
        self.steps = max(self.steps or 0, steps)

    def record_beat(self, beat: messages.Beat, now: float) -> None:
        self.beat, self.beat_at = beat, now
        if beat.keeps_ledger:
            self.record_steps(beat.steps)
        before, since = self.rated or (beat, now)
        if (seconds := now - since) >= RATED_OVER:
            done = beat.steps - before.steps, beat.collectives - before.collectives
            self.rates = done[0] / seconds, done[1] / seconds
        if self.rated is None or seconds >= RATED_OVER:
            self.rated = beat, now

    @property
    def last_dump(self) -> messages.Dump | None:
        """The program's ledger and stacks at its end; None if they aren't known."""
        if self.exit is None or self.exit.groups is None:
            return None
        threads = self.exit.threads
        program = [{"pid": self.pid, "threads": threads}] if threads else []
        return messages.Dump(0, self.exit.at, self.exit.groups, program, "")

    @property
    def status(self) -> str:
        """The state in words, as in ``outcome.json``."""
        words = _STATUS[self.state].format_map(self.exit._asdict() if self.exit else {})
        ended = self.state in (RankState.ENDED_BY_LAUNCHER, RankState.KILLED_BY_LAUNCHER)
        if ended and self.raised and not self.raised.by_launcher:
            # After the exception, the program waited, for example for child processes.
            return f"raised {self.raised.error.partition(':')[0]}, {words}"
        return words

    def candidate(self) -> Candidate | None:
        """Return the rank's own failure, if it failed by itself."""
        if self.failed:
            return self.failed
        own = self.exit if self.exit and self.exit.own else None
        if self.raised and not self.raised.by_launcher:
            return self._exception(self.raised, own)
        return self._end(own) if own else None

    def _exception(self, raised: messages.Failure, own: messages.Exit | None) -> Candidate:
        code = 1
        if own:
            code = 128 + own.signal if own.signal else own.code or 1
        failure = Failure(
            self.rank,
            self.host,
            exit_code=code,
            error=raised.error,
            file=raised.file,
            line=raised.line,
            traceback=raised.traceback or None,
            advice=raised.hint or None,
            cause=self.cause,
        )
        return Candidate(raised.at + self.clock, kinds.ERROR, code, failure)

    def _end(self, own: messages.Exit) -> Candidate | None:
        at, by_signal = own.at + self.clock, own.by_signal != 0
        reported = Cause.from_document(own.cause)
        note = (sentence(reported) if reported else "") or None
        if own.signal is not None:
            cause = reported or Cause(Kind.SIGNAL, signal=own.signal)
            failure = Failure(self.rank, self.host, signal=own.signal, note=note, cause=cause)
            return Candidate(at, kinds.SIGNAL, 128 + own.signal, failure, by_signal)
        if own.code:
            cause = Cause(Kind.UNEXPLAINED_EXIT if own.unexplained else Kind.EXIT, exit_code=own.code)
            note = note or sentence(cause) or None
            failure = Failure(self.rank, self.host, exit_code=own.code, note=note, cause=cause)
            return Candidate(at, kinds.EXIT, own.code, failure, by_signal)
        return None


RATED_OVER = 1.0
"""The shortest time, in seconds, over which a rate is measured."""

LONG_WAIT = 2.0
"""Minimum seconds of a delay that the line about a restart mentions."""


def slow_endings(ranks: Collection[Rank], end_at: float | None, names: Names) -> list[str]:
    """Return a line on the ranks that ended more than ``LONG_WAIT`` seconds after ``end_at``, if any."""
    if end_at is None:
        return []
    took = {rank.rank: (rank.over_at - end_at, rank.host) for rank in ranks if rank.over_at is not None}
    slow = {number: host for number, (seconds, host) in took.items() if seconds > LONG_WAIT}
    if not slow:
        return []
    hosts = fold_hosts(dict.fromkeys(slow.values()))
    seconds = max(seconds for seconds, _ in took.values())
    return [f"{seconds:.0f} s until {names.several(slow)} on {hosts} had ended"]


def attempt_outcome(
    ranks: Collection[Rank], kind: str, seconds: float, ended_after: float, waited: Sequence[str]
) -> AttemptOutcome:
    """Summarize an attempt of ``ranks``; times are in seconds."""
    hosts = tuple(dict.fromkeys(rank.host for rank in ranks))
    resumed = [rank.resumed_from for rank in ranks if rank.resumed_from is not None]
    steps = [rank.steps for rank in ranks if rank.steps is not None]
    return AttemptOutcome(
        kind,
        round(seconds, 3),
        hosts,
        min(resumed, default=None),
        max(steps, default=None),
        round(ended_after, 3),
        tuple(waited),
    )
