"""Computes rates, shares and key figures from a job's buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from cpulaunch.config.settings import Table
from cpulaunch.report.buckets import BUCKETS, MOST, Buckets, Floats
from cpulaunch.report.read import Job
from cpulaunch.supervise.job.status import duration
from cpulaunch.supervise.output.record import State
from cpulaunch.supervise.telemetry.metrics import headline_figure, with_unit
from cpulaunch.wording import COMPUTATION, EXPOSED, HIDDEN, INPUT, OFF_CPU, SLOWER_RANKS, counted

METRICS = 8
"""Maximum number of programs' metrics among the key figures; a table has more."""

LEAST_OFF = 0.05
"""Minimum share of a rank's time off the CPU that is shown, as interrupts and page faults also count."""

STEPS_EACH = 2
"""Minimum average number of steps for a point of a curve, so that curves have no gaps."""

SLOWER = 0.05
"""The slowest rank is named if its own time exceeds the others' median by this fraction, as in the status
line."""


class Numbers:
    """A job's figures.

    Arrays over time have an element for each of ``times``, the middles of intervals of ``width`` seconds.
    Unknown values are NaN.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        buckets = job.buckets
        self._together = _buckets_of(STEPS_EACH, buckets)
        self.width = buckets.width * self._together
        self._of = {name: self._joined(name) for name in buckets.of}
        used = (self._of["steps"].sum(axis=0) > 0) | (self._of["rss"].max(axis=0) > 0)
        self._count = int(np.flatnonzero(used)[-1]) + 1 if used.any() else 0
        self.times: Floats = (np.arange(self._count, dtype=np.float64) + 0.5) * self.width

    def sums(self, name: str) -> Floats:
        """Return a field by rank and time."""
        return self._of[name][:, : self._count]

    def _joined(self, name: str) -> Floats:
        """Return a field, with neighbouring buckets merged so that each has enough steps."""
        each = self.job.buckets.of[name]
        padded = np.pad(each, ((0, 0), (0, -each.shape[1] % self._together)))
        parts = padded.reshape(each.shape[0], -1, self._together)
        joined: Floats = parts.max(axis=2) if name in MOST else parts.sum(axis=2)
        return joined

    @property
    def longest(self) -> float:
        """Seconds from the job's start to its end, or to the end of its telemetry."""
        return max(self.job.end.seconds if self.job.end else 0.0, self._count * self.width, 1e-3)

    @property
    def first_step(self) -> float:
        """Seconds from the job's start to the first steps; 0 if there are none."""
        made = np.flatnonzero(self.sums("steps").sum(axis=0) > 0)
        return float(made[0]) * self.width if made.size else 0.0

    @cached_property
    def step_seconds(self) -> Floats:
        """Seconds of a step over time: the mean of all ranks."""
        return _ratio(self.sums("seconds").sum(axis=0), self.sums("steps").sum(axis=0))

    @property
    def typical(self) -> float | None:
        """Seconds of a step: the median over time, which pauses hardly affect; None without steps."""
        return _median(self.step_seconds)

    @property
    def work(self) -> tuple[str, str]:
        """The field that measures throughput (tokens, else samples, else steps), and its unit."""
        known = self.job.buckets.known
        name = next((name for name in ("tokens", "samples") if self._is_known(name, known)), "steps")
        return name, f"{name}/s"

    def _is_known(self, name: str, known: set[str]) -> bool:
        return name in known and bool(self.sums(name).any())

    @cached_property
    def throughput(self) -> Floats:
        """Throughput of all ranks together over time."""
        name, _ = self.work
        seconds = self.sums("seconds")
        ranks = np.maximum((seconds > 0).sum(axis=0), 1)
        if name == "steps":
            return _ratio(np.ones(self._count), self.step_seconds)
        return _ratio(self.sums(name).sum(axis=0), seconds.sum(axis=0) / ranks)

    @property
    def mfu(self) -> Floats | None:
        """Model FLOPs utilization over time; None if it is unknown."""
        peak, flops = self.job.head.get("peak_flops"), self.job.head.get("flops_per_step")
        if not isinstance(peak, (int, float)) or not isinstance(flops, (int, float)) or min(peak, flops) <= 0:
            return None
        return _ratio(np.full(self._count, flops / peak), self.step_seconds)

    @property
    def loss(self) -> Floats | None:
        """Loss over time, the mean of ranks that logged one; None if no rank did."""
        if "loss" not in self.job.buckets.known:
            return None
        return _ratio(self.sums("loss").sum(axis=0), self.sums("losses").sum(axis=0))

    @property
    def rss(self) -> Floats:
        """Bytes of resident memory, by rank and time."""
        rss = self.sums("rss")
        return np.where(rss > 0, rss, np.nan)

    @property
    def knows_waiting(self) -> bool:
        """Whether it is known how long ranks waited for each other."""
        return "waiting" in self.job.buckets.known

    @cached_property
    def own_per_step(self) -> Floats:
        """Seconds of a step by rank and time, minus the wait for other ranks if it is known."""
        seconds = self.sums("seconds") - (self.sums("waiting") if self.knows_waiting else 0.0)
        return _ratio(np.maximum(seconds, 0.0), self.sums("steps"))

    @property
    def own_of_ranks(self) -> Floats:
        """Median over time of each rank's ``own_per_step``."""
        return np.array([_median(row) or np.nan for row in self.own_per_step])

    @property
    def input_of_ranks(self) -> Floats:
        """Seconds per step that each rank waits for its input."""
        return np.nan_to_num(_ratio(self.sums("input").sum(axis=1), self.sums("steps").sum(axis=1)))

    def shares(self) -> dict[str, Floats]:
        """Return part of the time of steps → its share in each rank; empty if parts are unknown.

        In each interval, the rank that waits least is assumed to arrive last.  Its wait is the duration of
        exposed communication.  What the others wait longer is for slower ranks.
        """
        known = self.job.buckets.known & {"communication", "waiting", "input"}
        total = self.sums("seconds").sum(axis=1)
        if not known or not total.any():
            return {}
        waited = self.sums("waiting")
        least = np.where(self.sums("steps") > 0, waited, np.inf).min(axis=0)
        exposed = np.minimum(np.where(np.isfinite(least), least, 0.0), waited).sum(axis=1)
        waiting, under_way = waited.sum(axis=1), self.sums("communication").sum(axis=1)
        parts = {
            INPUT: self.sums("input").sum(axis=1),
            HIDDEN: np.maximum(under_way - waiting, 0.0),
            EXPOSED: exposed,
            SLOWER_RANKS: waiting - exposed,
        }
        parts = {name: np.minimum(part / np.maximum(total, 1e-9), 1.0) for name, part in parts.items()}
        rest = np.maximum(1.0 - sum(parts.values()), 0.0)
        # A waiting rank may sleep, so its waits are subtracted from its time off the CPU.
        waits = sum(part for name, part in parts.items() if name != HIDDEN)
        off = np.clip(self._off_cpu() - waits, 0.0, rest)
        parts[OFF_CPU] = np.where(off >= LEAST_OFF, off, 0.0)
        rest = rest - parts[OFF_CPU]
        return {COMPUTATION: rest, **{name: part for name, part in parts.items() if part.any()}}

    def _off_cpu(self) -> Floats:
        """Return a lower bound of each rank's share of time off the CPU; 0 if unknown."""
        found = self.job.buckets.processes.off_cpu()
        ranks = range(self.job.buckets.ranks)
        return np.array([found.get(rank, 0.0) for rank in ranks], dtype=np.float64)

    @property
    def slowest(self) -> tuple[int, float] | None:
        """The slowest rank, and the fraction by which its own time exceeds the others' median.

        None if the fraction is less than ``SLOWER``.
        """
        own = self.own_of_ranks
        if len(own) < 2 or not np.isfinite(own).all():
            return None
        rank = int(np.argmax(own))
        longest, others = of_and_others(own, rank)
        return (rank, longest / others - 1) if others > 0 and longest >= others * (1 + SLOWER) else None

    def key_figures(self) -> Iterator[tuple[str, str, float | None]]:
        """Yield name, text, and a number for comparisons of jobs, or None."""
        job, end = self.job, self.job.end
        yield "result", result(job), None
        if end and end.why:
            yield "reason", end.brief, None
        seconds = end.seconds if end else self.longest
        yield "time", duration(seconds), seconds
        steps = job.buckets.last_step or (end.steps if end else None)
        if steps:
            yield "steps", f"{steps:,}", float(steps)
        if job.setting(Table.watch.telemetry) == "none":
            yield "telemetry", "switched off (--telemetry none)", None
        if typical := self.typical:
            yield "a step", milliseconds(typical), typical
        if rate := _median(self.throughput):
            unit = self.work[1]
            yield "throughput", f"{quantity(rate)} {unit}", rate
        mfu = self.mfu
        if mfu is not None and (part := _median(mfu)):
            yield "MFU", f"{100 * part:.0f} %" if part > 0.1 else f"{100 * part:.2g} %", part
        for name, each in self.shares().items():
            if name != COMPUTATION:
                mean = float(np.mean(each))
                yield name, f"{100 * mean:.1f} %", mean
        if slowest := self.slowest:
            yield "slowest", f"{job.names.one(slowest[0])} (+{100 * slowest[1]:.0f} %)", None
        if (per_cycle := job.buckets.processes.per_cycle("instructions")) is not None:
            yield "instructions per cycle", f"{per_cycle:.2f}", per_cycle
        if (busy := job.buckets.processes.per_cycle("amx_busy")) is not None:
            yield "cycles with AMX busy", f"{100 * busy:.0f} %", busy
        if np.isfinite(self.rss).any():
            most = float(np.nanmax(self.rss))
            unit, divisor = unit_of_memory(most)
            yield f"peak memory (largest {job.names.noun})", f"{most / divisor:.3g} {unit}", most
        if self.loss is not None and np.isfinite(self.loss).any():
            last = float(self.loss[np.isfinite(self.loss)][-1])
            yield "last loss", f"{last:.4g}", last
        metrics = end.metrics if end else ()
        for metric in metrics[:METRICS]:
            what, value = headline_figure(metric)
            yield f"{metric.name}, as printed ({what})", with_unit(value, metric), value
        if len(metrics) > METRICS:
            yield "others, as printed", f"{len(metrics) - METRICS} more: outcome.json", None
        if end and end.restarts:
            yield "restarts", str(end.restarts), float(end.restarts)
        if stalls := sum(mark.kind == "stall" for mark in job.marks):
            yield "stalls", str(stalls), float(stalls)


def of_and_others(seconds: Floats, rank: int) -> tuple[float, float]:
    """Return a rank's value, and the median of the other ranks' values."""
    return float(seconds[rank]), float(np.median(np.delete(seconds, rank)))


def result(job: Job) -> str:
    """Return how the job ended, in one to three words."""
    if job.end is None:
        return "no end is known" if job.state is State.SILENT else job.state.value
    words = {"ok": "ok", "interrupted": "interrupted", "stalled": "stalled", "start_failed": "not started"}
    return words.get(job.end.kind, f"failed ({job.end.kind})".replace("_", " "))


def size(job: Job) -> str:
    """Return the size of a job: ``4 hosts, 16 ranks``."""
    ranks = len(job.ranks) or (job.end.ranks if job.end else job.buckets.ranks)
    hosts = len({rank.host for rank in job.ranks}) or (job.end.hosts if job.end else 1)
    return f"{counted(hosts, 'host')}, {counted(ranks, job.names.noun)}"


def milliseconds(seconds: float) -> str:
    """Return a duration: ``84 ms``, ``2.1 s``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def quantity(number: float) -> str:
    """Return a number with three significant digits: ``41,200``, ``3.15``."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 1000 else f"{number:.3g}"


def unit_of_memory(most: float) -> tuple[str, float]:
    """Return the unit that suits ``most`` bytes, and its number of bytes."""
    return ("GiB", 2.0**30) if most >= 2**30 else ("MiB", 2.0**20)


def _ratio(above: Floats, below: Floats) -> Floats:
    """Divide element by element; NaN where ``below`` is not positive."""
    above, below = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    found = np.full(np.broadcast(above, below).shape, np.nan)
    np.divide(above, below, out=found, where=np.nan_to_num(below) > 0)
    return found


def _buckets_of(steps: int, buckets: Buckets) -> int:
    """Return how many buckets to merge to get ``steps`` steps of a rank on average."""
    made, seconds = float(buckets.of["steps"].sum()), float(buckets.of["seconds"].sum())
    if not made:
        return 1
    return min(BUCKETS, max(1, math.ceil(float(steps * seconds / made) / buckets.width)))


def _median(values: Floats) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None
