"""The outcome of a job: how it ended, and why."""

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
"""Signals by which a batch system announces that a job's time is up."""

MAX_SIDES = 2
"""Maximum lines of a note that `append_sides` quotes."""


@dataclass(frozen=True)
class Failure:
    """The first failure of a job.

    ``error`` is ``Type: message`` of a Python exception, or why a rank couldn't be started.  ``file`` and
    ``line`` are the exception's place in the user's code, and ``traceback`` is its text.  ``note`` has
    further details, and ``advice`` says what to do.  ``rank`` and ``host`` are None if no rank is to blame.
    Decisions are based on ``cause``.

    If other ranks caused the failure, ``ranks`` has their numbers, ``text`` says what they did, and ``rank``
    only noticed it.  Either they called different operations (``disagree``, with details in ``note``), or
    they never called the operation in which others waited.
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
        """The failure in one line.  Ranks that fail for the same reason have the same line."""
        if self.error:
            return self.error + (f" at {self.file}:{self.line}" if self.file else "")
        return f"exit code {self.exit_code}" if self.signal is None else signal_name(self.signal)

    def in_a_line(self, kind: str, names: Names = RANKS) -> str:
        """Say who failed and how: ``rank 3 on node3: ValueError: …``.

        ``kind`` is the kind of the job's outcome.  The place in the code is left out, as paths are long.
        """
        about = self.error if kind == STALLED and self.error else self.text
        if about:  # this text names its ranks
            return append_sides(about, self.note if self.disagree else None)
        if self.rank is None and self.host is None:
            return self.error or "it failed"
        who = f"host {self.host}" if self.rank is None else f"{names.one(self.rank)} on {self.host}"
        if self.signal is not None:
            details = filter(None, (self.error, self.note))
            return ": ".join([f"{who} got {signal_name(self.signal)}", *details])
        return f"{who}: {self.error}" if self.error else f"{who} ended with exit code {self.exit_code}"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Failure:
        """Read the fields for `in_a_line` from an ``outcome.json``; ignore values of a wrong type."""
        types = {"rank": int, "signal": int, "exit_code": int, "disagree": bool}
        types |= dict.fromkeys(("host", "error", "note", "text"), str)
        return cls(**{name: raw[name] for name, kind in types.items() if isinstance(raw.get(name), kind)})

    def error_after(self, name: str) -> str:
        """Return the error for a line that starts with ``name``: the error's own ``name`` becomes "it"."""
        return (self.error or "").replace(f": {name} ", ": it ", 1)


@dataclass(frozen=True)
class RankOutcome:
    """The end of one rank; ``status`` is in words."""

    rank: int
    host: str
    pid: int | None
    cores: str | None
    status: str


@dataclass(frozen=True)
class Stall:
    """A time without progress.

    It lasted ``seconds`` and began ``at`` seconds after the job's start, in ``attempt``, counted from 1.
    ``ranks`` are the ranks that the others waited for, or that waited for each other.  The first of them ran
    on ``host`` and was at ``line`` of ``file``; if all ranks were at the same line, ``file`` and ``line`` are
    that line.  The other ranks waited in ``operation`` with number ``sequence``.  Unknown values are None.
    ``text`` describes the stall in words.  ``note`` says where the ranks are, one per line, and ``advice``
    what will happen, or what to do.
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
    """The end of one attempt of a job, and its progress.

    ``hosts`` are the hosts that it ran on.  ``resumed_from`` is the step of the loaded state, if the ranks
    reported one.  ``steps`` is the number of optimizer steps in this attempt; None if steps can't be seen.
    The attempt took ``seconds``; the launcher began to end its ranks after ``ended_after`` seconds.
    ``waited`` lists what took long after that.
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
        """The last step, counted from the start of the training; None if steps can't be seen."""
        return None if self.steps is None else (self.resumed_from or 0) + self.steps


@dataclass(frozen=True)
class Metric:
    """Statistics of a metric that programs have printed on stdout, over all ranks.

    ``ranks`` is the number of ranks that printed it, and ``values`` the number of values.  ``total`` is the
    sum of the ranks' means if the metric is a rate, else None.  The other statistics are over all values;
    ``p99`` is the 99th percentile.  If ``sample`` is not None, ``median`` and ``p99`` come from a random
    sample of this number of values.
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
    """The end of a job, as in ``outcome.json``.

    ``attempts`` and ``stalls`` are those of the whole job; the other fields describe the last attempt.
    ``by_signal``: a signal from outside ended the job or its ranks.  ``began`` is False if that was before
    the first step or between two attempts, so that nothing is lost if the job is started again.
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
    by_signal: bool = False
    began: bool = True

    def if_restartable(self) -> Outcome:
        """Return the outcome of a job that can be started again.

        If a signal ended the job between two attempts, or before the last attempt made a step, no work is
        lost.  The outcome is then that of a job that has saved its state.
        """
        if not self.by_signal or self.exit_code not in {128 + number for number in WARNING}:
            return self
        last = self.attempts[-1]
        if last.steps and last.kind == self.kind:
            return self
        return replace(self, exit_code=SAVED_EXIT_CODE, kind=INTERRUPTED, first_failure=None, began=False)

    def after(self, earlier: Sequence[AttemptOutcome], stalls: Sequence[Stall]) -> Outcome:
        """Return the job's outcome after ``earlier`` attempts, which had ``stalls``, and this one."""
        return replace(
            self, restarts=len(earlier), stalls=(*stalls, *self.stalls), attempts=(*earlier, *self.attempts)
        )

    def to_text(self) -> str:
        document: dict[str, Any] = {"schema": SCHEMA, **asdict(self), "seconds": round(self.seconds, 3)}
        if self.first_failure:
            document["first_failure"]["cause"] = self.first_failure.cause.document()
        return json.dumps(document, indent=1) + "\n"


def append_sides(text: str, note: str | None) -> str:
    """Append the first lines of ``note``, the sides of a disagreement, to ``text``."""
    lines = (note or "").splitlines()
    sides = "; ".join(lines[:MAX_SIDES]) + (f"; {len(lines) - MAX_SIDES} more" if lines[MAX_SIDES:] else "")
    return f"{text}: {sides}" if sides else text


def signal_name(number: int) -> str:
    """Return a signal's name: ``"SIGKILL"`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
