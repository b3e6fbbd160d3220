"""A sink that TensorBoard reads: ``--telemetry tensorboard`` (docs/telemetry.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cpulaunch.errors import UsageError
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.telemetry.rows import Row
from cpulaunch.supervise.telemetry.sinks.threaded import ThreadedSink
from cpulaunch.telemetry import OF_STEPS, SUMS

DIRECTORY = "tensorboard"
"""Directory of the event files, in the job's directory."""

MAX_OPEN = 64
"""Maximum number of steps that wait for rows of further ranks."""

MAX_WAITING = 100_000
"""Maximum rows that wait for the disk; further rows are dropped."""

Scalar = tuple[str, float, int]
"""Name, value, step."""


class Scalars:
    """Aggregates the ranks' rows of each step into scalars of the job.  Pure."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[int, list[Row]] = {}
        self._first: int | None = None  # first step of this attempt
        self._memory: dict[int, float] = {}
        self._head: Row = {}

    def take(self, rows: Sequence[Row]) -> Iterator[Scalar]:
        """Add rows, and yield the scalars of the steps that they complete."""
        for row in rows:
            if "schema" in row:
                self._head |= row
            elif "attempt" in row:
                yield from self.rest()
                self._ranks, self._first = row["world_size"], None
            elif "step" in row:
                self._first = min(self._first or row["step"], row["step"])
                of_step = self._open.setdefault(row["step"], [])
                of_step.append(row)
                if len(of_step) >= self._ranks:
                    yield from self._scalars_of(row["step"])
                elif len(self._open) > MAX_OPEN:
                    yield from self._scalars_of(next(iter(self._open)))
            elif "rss" in row:
                self._memory[row["rank"]] = row["rss"]

    def rest(self) -> Iterator[Scalar]:
        """Yield the scalars of steps that are incomplete, because rows of some ranks are missing."""
        for step in sorted(self._open):
            yield from self._scalars_of(step)

    def _scalars_of(self, step: int) -> Iterator[Scalar]:
        rows = self._open.pop(step)
        seconds = _mean(rows, "seconds") or 0.0
        yield "time/longest_of_a_rank", max(row["seconds"] / row.get("steps", 1) for row in rows), step
        for field in OF_STEPS:
            if field.scalar and not field.is_rate and (mean := _mean(rows, field.name)) is not None:
                yield field.scalar, mean, step
        if step != self._first:  # the first step includes the start of the attempt
            yield from self._rates(rows, seconds, step)
        if self._memory:
            yield "memory/largest_rank_in_GiB", max(self._memory.values()) / 2**30, step

    def _rates(self, rows: Sequence[Row], seconds: float, step: int) -> Iterator[Scalar]:
        for field in OF_STEPS:
            if field.scalar and field.is_rate and seconds and (each := _mean(rows, field.name)):
                yield field.scalar, each * self._ranks / seconds, step
        peak, flops = self._head.get("peak_flops"), self._head.get("flops_per_step")
        if peak and flops and seconds:
            yield "MFU", flops / seconds / peak, step


def summary_writer() -> Any:
    """Return tensorboardX's SummaryWriter.  Raises UsageError if it is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        hint = "pip install 'cpulaunch[tensorboard]', or pip install tensorboardX"
        raise UsageError("--telemetry tensorboard requires the package tensorboardX", hint=hint) from None
    return SummaryWriter


class TensorBoardSink(ThreadedSink):
    """Writes event files.

    Raises UsageError if tensorboardX is not installed.  ``warn`` is called with a line if the files cannot be
    written.
    """

    def __init__(
        self, directory: JobDirectory, scalars: Scalars, began: float, warn: Callable[[str], None]
    ) -> None:
        """``began``: start of the job, in seconds since 1970."""
        super().__init__("tensorboard", MAX_WAITING)
        make = summary_writer()
        self._make: Callable[[], Any] = lambda: make(f"{directory.place}/{DIRECTORY}")
        self._scalars, self._began, self._warn = scalars, began, warn
        self._writer: Any = None

    def handle_loss(self, error: OSError | None) -> None:
        if error:
            self._warn(f"{DIRECTORY}/ can't be written: {error.strerror}; the job goes on without it")

    def write(self, rows: list[Row], closed: bool) -> None:
        self._writer = self._writer or self._make()
        at = self._began + max((row.get("time", 0.0) for row in rows), default=0.0)
        last = self._scalars.rest() if closed else ()
        for name, value, step in (*self._scalars.take(rows), *last):
            self._writer.add_scalar(name, value, step, walltime=at)
        self._writer.flush()
        if closed:
            self._writer.close()


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean per step of a field over the rows that have the field; None if no row has it."""
    known = [row for row in rows if row.get(name) is not None]
    if not known:
        return None
    steps = sum(row.get("steps", 1) for row in known) if name in SUMS else len(known)
    return float(sum(row[name] for row in known) / steps)
