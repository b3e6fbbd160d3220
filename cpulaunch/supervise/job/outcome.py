"""How a job ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cpulaunch.cause import EXCEPTION, Cause
from cpulaunch.errors import SAVED_EXIT_CODE
from cpulaunch.model.names import RANKS, Names

SCHEMA = 1
OK, ERROR, EXIT, SIGNAL = "ok", "error", "exit", "signal"
NODE_LOST, STALLED = "node_lost", "stalled"
INTERRUPTED, START_FAILED = "interrupted", "start_failed"

WARNING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which a batch system says that a job's time is up."""

MAX_SIDES = 2
"""Lines on what ranks have called that are told in one line."""


@dataclass(frozen=True)
class Failure:
    """What went wrong first.

    ``error`` is ``Type: message`` of a Python exception (``file`` and ``line``: where the user's code
    was; ``traceback``: its text), or why a rank couldn't be started.  ``note`` is what else is known of
    it, and ``advice`` what to do.  ``rank`` and ``host`` are None where none is to blame.  ``cause`` is what
    decisions are made by.

    ``ranks`` are those whom it is about, where these aren't ``rank`` alone, and ``text`` is what has happened
    then: ranks have called different operations (``disagree``), as ``note`` says, have left without calling
    what others waited in, or had not called it when that timed out.  ``rank`` was only the first to find out.
    """

    rank: int | None = None
    host: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    error: str | None = None
    file: str | None = None
    line: int | None = None
    traceback: str | None = None
    note: str | None = None
    cause: Cause = EXCEPTION
    disagree: bool = False
    ranks: tuple[int, ...] = ()
    text: str | None = None
    advice: str | None = None

    @property
    def summary(self) -> str:
        """What went wrong, in one line that is the same for all who fail alike."""
        if self.error:
            return self.error + (f" at {self.file}:{self.line}" if self.file else "")
        return f"exit code {self.exit_code}" if self.signal is None else signal_name(self.signal)

    def in_a_line(self, kind: str, names: Names = RANKS) -> str:
        """Who has failed and how: ``rank 3 on node3: ValueError: …``; ``kind`` is the job's outcome's.

        The place is left out, as paths are long.
        """
        about = self.error if kind == STALLED and self.error else self.text
        if about:  # it names whom it is about
            return with_sides(about, self.note if self.disagree else None)
        if self.rank is None and self.host is None:
            return self.error or "it failed"
        who = f"host {self.host}" if self.rank is None else f"{names.one(self.rank)} on {self.host}"
        if self.signal is not None:
            told = ": ".join(filter(None, (self.error, self.note)))
            return f"{who} got {signal_name(self.signal)}" + (f": {told}" if told else "")
        return f"{who}: {self.error}" if self.error else f"{who} ended with exit code {self.exit_code}"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Failure:
        """What `in_a_line` needs of an ``outcome.json``, which another version may have written."""

        def text(name: str) -> str | None:
            value = raw.get(name)
            return str(value) if value else None

        def number(name: str) -> int | None:
            value = raw.get(name)
            return value if isinstance(value, int) else None

        return cls(
            rank=number("rank"),
            host=text("host"),
            signal=number("signal"),
            exit_code=number("exit_code"),
            error=text("error"),
            note=text("note"),
            disagree=bool(raw.get("disagree")),
            text=text("text"),
        )

    def of(self, name: str) -> str:
        """Its error in a line that has named the program already, as ``name``; a stall's says the place."""
        return (self.error or "").replace(f": {name} ", ": it ", 1)


@dataclass(frozen=True)
class RankOutcome:
    """One rank's end, in words."""

    rank: int
    host: str
    pid: int | None
    cores: str | None
    status: str


@dataclass(frozen=True)
class Stall:
    """A time without progress, ``at`` so many seconds after the job's start, in this ``attempt``, from 1.

    ``ranks`` are those that the others waited for, or that have waited for each other, ``host`` the first
    one's, which was at ``line`` of ``file``; the others waited in the ``operation`` with this ``sequence``
    number.  All of these may be unknown; where all ranks were at one line, that is there, too.  ``text`` says
    it in words, ``note`` who is where, a line each, and ``advice`` what becomes of it, or what can be done.
    """

    seconds: float
    ranks: tuple[int, ...]
    host: str | None
    operation: str | None
    sequence: int | None
    file: str | None
    line: int | None
    text: str
    note: str = ""
    advice: str = ""
    at: float = 0.0
    attempt: int = 1


@dataclass(frozen=True)
class AttemptOutcome:
    """How one of a job's attempts ended, and what it did.

    ``hosts`` are those that it ran on.  ``resumed_from``: the step after which it went on, where its ranks
    have said so.  ``steps`` of an optimizer were made in it; None where none could be seen.  It was ended
    ``ended_after`` so many of its ``seconds``; ``waited`` says for what it had to wait then, where that took
    long.
    """

    kind: str
    seconds: float
    hosts: tuple[str, ...]
    resumed_from: int | None = None
    steps: int | None = None
    ended_after: float | None = None
    waited: tuple[str, ...] = ()

    @property
    def reached(self) -> int | None:
        """The step that it has come to; None where steps can't be seen."""
        return None if self.steps is None else (self.resumed_from or 0) + self.steps


@dataclass(frozen=True)
class Metric:
    """A figure that programs have stated by lines on their stdout, over all of them.

    ``ranks`` of them have, ``values`` times in all.  ``total`` is the sum over the ranks of each one's mean;
    None for what is no rate.  ``median`` and ``p99``, the 99th percentile, ``mean``, ``least`` and ``most``
    are those of all values.  Of very many, the first two are those of a ``sample`` of so many.
    """

    name: str
    unit: str
    ranks: int
    values: int
    total: float | None
    mean: float
    median: float
    p99: float
    least: float
    most: float
    sample: int | None = None


@dataclass(frozen=True)
class Outcome:
    """A job's end, as in ``outcome.json``.  ``attempts`` are all of them, the rest is the last one's.

    ``told``: a signal from outside has ended it, or its ranks.  ``began``: whether it made any step;
    False only where such a signal has ended a job that can be started again.
    """

    exit_code: int
    kind: str
    seconds: float
    first_failure: Failure | None
    ranks: tuple[RankOutcome, ...]
    restarts: int = 0
    stalls: tuple[Stall, ...] = ()
    attempts: tuple[AttemptOutcome, ...] = ()
    metrics: tuple[Metric, ...] = ()
    told: bool = False
    began: bool = True

    def if_restartable(self) -> Outcome:
        """The outcome, if the job can be started again: a signal that came early has lost nothing.

        It came between two attempts, or before any step of the last one that could be seen.
        """
        if not self.told or self.exit_code not in {128 + number for number in WARNING}:
            return self
        last = self.attempts[-1]
        if last.steps and last.kind == self.kind:
            return self
        return replace(self, exit_code=SAVED_EXIT_CODE, kind=INTERRUPTED, first_failure=None, began=False)

    def after(self, earlier: Sequence[AttemptOutcome], stalls: Sequence[Stall]) -> Outcome:
        """The job's outcome, where ``earlier`` attempts, in which it had ``stalls``, came before this one."""
        return replace(
            self,
            restarts=len(earlier),
            stalls=(*stalls, *self.stalls),
            attempts=(*earlier, *self.attempts),
        )

    def to_text(self) -> str:
        document: dict[str, Any] = {"schema": SCHEMA, **asdict(self), "seconds": round(self.seconds, 3)}
        if self.first_failure:
            document["first_failure"]["cause"] = self.first_failure.cause.document()
        return json.dumps(document, indent=1) + "\n"


def with_sides(text: str, note: str | None) -> str:
    """``text``, and what ranks have called that disagree, by the ``note``, in one line."""
    lines = (note or "").splitlines()
    sides = "; ".join(lines[:MAX_SIDES]) + (f"; {len(lines) - MAX_SIDES} more" if lines[MAX_SIDES:] else "")
    return f"{text}: {sides}" if sides else text


def signal_name(number: int) -> str:
    """``"SIGKILL"`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
