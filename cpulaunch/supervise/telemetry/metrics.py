"""Figures that programs state by lines on their stdout, ``CPULAUNCH_METRIC name=value unit``; pure.

A rate, whose unit ends in ``/s`` or the like, adds up: its total is the sum over the ranks of each one's
mean.  Of a time, the median and the 99th percentile of all values count; of anything else, the mean.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

from cpulaunch import metric_line
from cpulaunch.metric_line import WORD, named_in, read_metric, why_unread
from cpulaunch.supervise.job.outcome import Metric
from cpulaunch.wording import counted

LINE = WORD.encode()
"""How such a line begins."""

MAX_LINE = 4 * metric_line.MAX_LINE
"""Bytes of a line that can be one."""

SHOWN = 80
"""Characters that a note shows of a line that can't be read."""

MAX_TOLD = 100
"""Names and causes of such lines that are told of each rank; each of them is told once."""

MAX_METRICS = 1000
"""Metrics of a job, by names and units, that are kept."""

MAX_VALUES = 10_000
"""Values of a rank and metric that are kept for median and percentile.  Of more, chance chooses a sample."""

MAX_ALL_VALUES = 250_000
"""Values of all ranks and metrics that are kept, so that the end of a big job takes neither long nor much
memory.  Where there are more, each sample is cut to half of what it may have."""

MIN_VALUES = 16
"""Values to which samples are cut at most."""

_TIME = r"([nuµμm]?s|([nµμum]|nano|micro|milli)?sec(ond)?s?|min(ute)?s?|h|hrs?|hours?)"
_TIMES = re.compile(_TIME, re.IGNORECASE)
_RATE = re.compile(rf".*(/ ?|per ){_TIME}|fps|ips|qps|rps|tps|hz", re.IGNORECASE)

_CUT = b"-"
"""Stands for the beginning of a line, of which the end is kept: a metric may be there."""


class Values:
    """One rank's values of one metric: all of them in number and sum, and a sample for the rest.

    Chance chooses the sample, each value with the same likelihood, as values may come in a pattern.  ``seed``
    makes it the same one in another run.
    """

    def __init__(self, seed: int, limit: int = MAX_VALUES) -> None:
        self.count, self.sum, self._limit = 0, 0.0, limit
        self.least, self.most = float("inf"), float("-inf")
        self.sample = array("d")
        self._seed = seed
        self._chance: Random | None = None  # it takes 2 kB

    def add(self, value: float) -> None:
        self.count += 1
        self.sum += value
        self.least, self.most = min(self.least, value), max(self.most, value)
        if self.count <= self._limit:
            self.sample.append(value)
            return
        self._chance = self._chance or Random(self._seed)
        at = int(self._chance.random() * self.count)  # Vitter's Algorithm R
        if at < self._limit:
            self.sample[at] = value

    def cut(self, limit: int) -> None:
        """Keep at most ``limit`` values, which chance chooses among those that it has chosen before."""
        self._limit = limit
        if len(self.sample) > limit:
            self._chance = self._chance or Random(self._seed)
            self.sample = array("d", self._chance.sample(self.sample, limit))

    @property
    def weight(self) -> float:
        """How many values each one of the sample stands for."""
        return self.count / len(self.sample)


class Metrics:
    """The metrics of all ranks."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[int, Values]] = {}
        self._rest: dict[int, bytes] = {}  # of each rank's last line, which has no end yet
        self._told: dict[int, set[tuple[str, str]]] = {}
        self._limit, self._kept = MAX_VALUES, 0  # of each sample, and of all together

    def feed(self, rank: int, data: bytes) -> Iterator[str]:
        """A piece of what ``rank`` has printed.  What is wrong with a line completes "rank N …"."""
        data = self._rest.pop(rank, b"") + data
        if LINE in data:
            *lines, rest = data.split(b"\n")
            for line in lines:
                if LINE in line:
                    yield from self._line(rank, line)
        else:
            rest = data[data.rfind(b"\n") + 1 :]
        if rest:
            self._rest[rank] = rest if len(rest) <= MAX_LINE else _CUT + rest[-MAX_LINE:]

    def finish(self, rank: int) -> Iterator[str]:
        """``rank`` prints nothing more, so that its last line has ended, too."""
        if (rest := self._rest.pop(rank, b"")) and LINE in rest:
            yield from self._line(rank, rest)

    def _line(self, rank: int, line: bytes) -> Iterator[str]:
        """A metric may follow something that has no line end of its own, such as a progress bar."""
        before, _, after = line.rpartition(LINE)
        text = WORD + after[:MAX_LINE].decode(errors="replace")
        if not after[:1].isspace():
            return  # another word that begins alike
        if not (stated := read_metric(text)):
            if not before.rpartition(b"\r")[2]:
                said = f" printed a metric that can't be read: {why_unread(text)}; it was {text[:SHOWN]!r}"
                yield from self._tell(rank, named_in(text), why_unread(text), said)
            return
        key = stated.name, stated.unit
        if key not in self._found and len(self._found) >= MAX_METRICS:
            said = f" stated more than {MAX_METRICS} metrics, of which no more are kept"
            yield from self._tell(rank, "", said, said)
            return
        ranks = self._found.setdefault(key, {})
        values = ranks.get(rank) or ranks.setdefault(rank, Values(rank, self._limit))
        had = len(values.sample)
        values.add(stated.value)
        self._kept += len(values.sample) - had
        if self._kept > MAX_ALL_VALUES and self._limit > MIN_VALUES:
            self._cut_samples()

    def _cut_samples(self) -> None:
        self._limit //= 2
        found = [values for ranks in self._found.values() for values in ranks.values()]
        for values in found:
            values.cut(self._limit)
        self._kept = sum(len(values.sample) for values in found)

    def _tell(self, rank: int, name: str, cause: str, said: str) -> Iterator[str]:
        """Once for each name and cause."""
        told = self._told.setdefault(rank, set())
        if (name, cause) not in told and len(told) < MAX_TOLD:
            told.add((name, cause))
            yield said

    def rates(self) -> str:
        """What the rates come to by now, in a few words; empty where there is none."""
        found = (
            (name, unit, sum(each.sum / each.count for each in ranks.values()))
            for (name, unit), ranks in self._found.items()
            if _RATE.fullmatch(unit)
        )
        return FIGURES.join(
            f"{name} {number_text(total)} {unit}" for name, unit, total in islice(found, BRIEF)
        )

    def summary(self) -> tuple[Metric, ...]:
        """All metrics, in the order in which they were first stated."""
        return tuple(_metric(*key, list(ranks.values())) for key, ranks in self._found.items())


def _metric(name: str, unit: str, ranks: Sequence[Values]) -> Metric:
    count, sampled = sum(each.count for each in ranks), sum(len(each.sample) for each in ranks)
    sample = sorted((value, each.weight) for each in ranks for value in each.sample)
    return Metric(
        name,
        unit,
        len(ranks),
        count,
        sum(each.sum / each.count for each in ranks) if _RATE.fullmatch(unit) else None,
        sum(each.sum for each in ranks) / count,
        _quantile(sample, 0.5),
        _quantile(sample, 0.99),
        min(each.least for each in ranks),
        max(each.most for each in ranks),
        sampled if sampled < count else None,
    )


def _quantile(ordered: Sequence[tuple[float, float]], share: float) -> float:
    """The value that this ``share`` of all lie below, between two neighbours by their distance.

    ``ordered`` are values, each with how many of all it stands for, and is in the middle of.
    """
    at = share * (sum(weight for _, weight in ordered) - 1)
    below, there = ordered[0][0], 0.0
    before = 0.0
    for value, weight in ordered:
        here = before + (weight - 1) / 2
        if here >= at:
            return value if here == there else below + (at - there) / (here - there) * (value - below)
        below, there = value, here
        before += weight
    return below


# ---- in words

MANY = 1e15
"""From this number on, powers of ten stand for its digits."""

BRIEF = 2
"""Figures that a job's line has."""

FIGURES = " · "
"""Between them."""


def what_counts(metric: Metric) -> tuple[str, float]:
    """``in all``, ``median`` or ``mean``, and that number."""
    if metric.total is not None:
        return "in all", metric.total
    return ("median", metric.median) if _TIMES.fullmatch(metric.unit) else ("mean", metric.mean)


def in_brief(metrics: Sequence[Metric]) -> str:
    """The first rates, times, or others, as ``throughput 1,234 samples/s · latency 12.3 ms``."""
    order = ("in all", "median", "mean")
    chosen = sorted(metrics, key=lambda metric: order.index(what_counts(metric)[0]))[:BRIEF]
    return FIGURES.join(f"{metric.name} {with_unit(what_counts(metric)[1], metric)}" for metric in chosen)


def with_unit(number: float, metric: Metric) -> str:
    """``"203,520 samples/s"``."""
    return f"{number_text(number)} {metric.unit}".rstrip()


def metrics_table(metrics: Sequence[Metric], noun: str) -> str:
    """A line for each metric: what of it counts, and of how many programs it is."""
    width = max((len(metric.name) for metric in metrics), default=0)
    lines = (f"cpulaunch: {metric.name:{width}}  {_words(metric, noun)}\n" for metric in metrics)
    return "".join(lines)


def _words(metric: Metric, noun: str) -> str:
    of = counted(metric.ranks, noun)
    if metric.values > metric.ranks:
        of = f"{metric.values:,} values of {of}"
    if metric.values > 1:
        of += f", {number_text(metric.least)} to {number_text(metric.most)}"
    what, number = what_counts(metric)
    main = with_unit(number, metric)
    if what == "median" and metric.sample is not None:
        of += f"; percentiles of a sample of {metric.sample:,}"
    if what == "in all":
        return f"{main} {what} ({of})"
    if what == "median":
        return f"{what} {main}, 99th percentile {with_unit(metric.p99, metric)} ({of})"
    return f"{what} {main} ({of})"


def number_text(value: float) -> str:
    """Four digits, or all before the decimal point, unless these are many: ``"203,520"``, ``"0.0584"``."""
    if abs(value) >= MANY:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
