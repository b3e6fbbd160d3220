"""A sink that TensorBoard reads: ``--telemetry tensorboard`` (docs/telemetry.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cpulaunch.errors import UsageError
from cpulaunch.supervise.directory import JobDirectory
from cpulaunch.supervise.telemetry import Row

DIRECTORY = "tensorboard"
"""Where its files are, in the job's directory."""

MAX_OPEN = 64
"""Steps that wait for their last ranks at most."""

MAX_WAITING = 100_000
"""Rows that wait for the disk; what comes then is dropped."""

Scalar = tuple[str, float, int]
"""Name, value, step."""


class Scalars:
    """Joins the ranks' rows of a step into scalars of the job.  Pure."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[int, list[Row]] = {}
        self._memory: dict[int, float] = {}
        self._head: Row = {}

    def take(self, rows: Sequence[Row]) -> Iterator[Scalar]:
        """What is known with these rows."""
        for row in rows:
            if "schema" in row:
                self._head |= row
            elif "attempt" in row:
                yield from self.rest()
                self._ranks = row["world_size"]
            elif "step" in row:
                of_step = self._open.setdefault(row["step"], [])
                of_step.append(row)
                if len(of_step) >= self._ranks:
                    yield from self._joined(row["step"])
                elif len(self._open) > MAX_OPEN:
                    yield from self._joined(next(iter(self._open)))
            elif "rss" in row:
                self._memory[row["rank"]] = row["rss"]

    def rest(self) -> Iterator[Scalar]:
        """Steps of which not all ranks have told."""
        for step in sorted(self._open):
            yield from self._joined(step)

    def _joined(self, step: int) -> Iterator[Scalar]:
        rows = self._open.pop(step)
        seconds = _mean(rows, "seconds") or 0.0
        yield "time/step", seconds, step
        yield "time/longest_of_a_rank", max(row["seconds"] for row in rows), step
        for name in ("communication", "waiting", "input"):
            if (mean := _mean(rows, name)) is not None:
                yield f"time/{name}", mean, step
        for name in ("tokens", "samples"):
            if seconds and (each := _mean(rows, name)):
                yield f"throughput/{name}_per_second", each * self._ranks / seconds, step
        if (loss := _mean(rows, "loss")) is not None:
            yield "loss", loss, step
        peak, flops = self._head.get("peak_flops"), self._head.get("flops_per_step")
        if peak and flops and seconds:
            yield "MFU", flops / seconds / peak, step
        if self._memory:
            yield "memory/largest_rank_in_GiB", max(self._memory.values()) / 2**30, step


class TensorBoardSink:
    """Writes event files in a thread of its own: a disk that hangs stops nobody.

    UsageError where the package that writes them isn't installed.  ``warn`` gets a line where they can't be.
    """

    def __init__(
        self, directory: JobDirectory, scalars: Scalars, began: float, warn: Callable[[str], None]
    ) -> None:
        """``began``: when the job did, in seconds since 1970."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            hint = "pip install 'cpulaunch[tensorboard]', or pip install tensorboardX"
            raise UsageError("--telemetry tensorboard takes the package tensorboardX", hint=hint) from None
        self._make: Callable[[], Any] = lambda: SummaryWriter(f"{directory.place}/{DIRECTORY}")
        self._scalars, self._began, self._warn = scalars, began, warn
        self._changed = threading.Condition()
        self._waiting: list[Row] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def rows(self, rows: Sequence[Row]) -> None:
        """Write them, soon."""
        with self._changed:
            if len(self._waiting) > MAX_WAITING:
                return
            self._waiting += rows
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tensorboard", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, patience: float) -> bool:
        """Wait until all is written; False where that took more than ``patience`` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            writer = self._make()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closed)
                    rows, self._waiting = self._waiting, []
                    closed = self._closed
                at = self._began + max((row.get("time", 0.0) for row in rows), default=0.0)
                last = self._scalars.rest() if closed else ()
                for name, value, step in (*self._scalars.take(rows), *last):
                    writer.add_scalar(name, value, step, walltime=at)
                writer.flush()
                if closed and not self._waiting:
                    writer.close()
                    return
        except OSError as e:
            self._warn(f"{DIRECTORY}/ can't be written: {e.strerror}; the job goes on without it")


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None
