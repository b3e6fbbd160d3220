"""Metrics that programs print on stdout, as lines ``CPULAUNCH_METRIC name=value unit``.  Pure.

A metric's unit decides how the metric is summarized.  For a rate, with a unit such as ``samples/s``, the
total is the sum of the ranks' means.  A time has the median and the 99th percentile of all values.  Another
metric has the mean.
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
"""First word of a metric line."""

MAX_LINE = 4 * metric_line.MAX_LINE
"""Maximum bytes of a metric line."""

SHOWN = 80
"""Maximum characters of a malformed line that are quoted."""

MAX_REPORTED = 100
"""Maximum number of malformed lines that are reported per rank; each name and cause is reported once."""

MAX_METRICS = 1000
"""Maximum number of metrics of a job.  Metrics with different units are different metrics."""

MAX_VALUES = 10_000
"""Maximum size of the sample of one rank's values of one metric, for the median and percentile."""

MAX_ALL_VALUES = 250_000
"""Maximum size of all samples together.  If they are larger, the limit of each sample is halved.

This bounds the time and memory of a big job's summary.
"""

MIN_VALUES = 16
"""Minimum limit of a sample; a smaller limit is not halved."""

_TIME = r"([nuµμm]?s|([nµμum]|nano|micro|milli)?sec(ond)?s?|min(ute)?s?|h|hrs?|hours?)"
_TIMES = re.compile(_TIME, re.IGNORECASE)
_RATE = re.compile(rf".*(/ ?|per ){_TIME}|fps|ips|qps|rps|tps|hz", re.IGNORECASE)

_CUT = b"-"
"""Replaces the beginning of a long line.  The end of the line is kept, because it may have a metric."""


class Values:
    """One rank's values of one metric.

    Number, sum, minimum and maximum are exact.  Quantiles come from a uniform random sample of the values,
    which ``seed`` makes reproducible.
    """

    def __init__(self, seed: int, limit: int = MAX_VALUES) -> None:
        self.count, self.sum, self._limit = 0, 0.0, limit
        self.least, self.most = float("inf"), float("-inf")
        self.sample = array("d")
        self._seed = seed
        self._chance: Random | None = None  # created when needed, because it takes 2 kB

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
        """Reduce the sample to ``limit`` values, chosen at random."""
        self._limit = limit
        if len(self.sample) > limit:
            self._chance = self._chance or Random(self._seed)
            self.sample = array("d", self._chance.sample(self.sample, limit))

    @property
    def weight(self) -> float:
        """How many values each value of the sample represents."""
        return self.count / len(self.sample)


class Metrics:
    """The metrics of all ranks."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[int, Values]] = {}
        self._rest: dict[int, bytes] = {}  # each rank's unfinished line
        self._reported: dict[int, set[tuple[str, str]]] = {}
        self._limit, self._kept = MAX_VALUES, 0  # limit of each sample, and size of all samples

    def feed(self, rank: int, data: bytes) -> Iterator[str]:
        """Add a piece of the output of ``rank``.

        Yields a message for each malformed line, worded to follow "rank N".
        """
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
        """Read a rank's unfinished last line, at the end of its output.  Yields messages like ``feed``."""
        if (rest := self._rest.pop(rank, b"")) and LINE in rest:
            yield from self._line(rank, rest)

    def _line(self, rank: int, line: bytes) -> Iterator[str]:
        """Read a line that contains ``LINE``, perhaps after other text, such as a progress bar."""
        before, _, after = line.rpartition(LINE)
        text = WORD + after[:MAX_LINE].decode(errors="replace")
        if not after[:1].isspace():
            return  # a longer word
        if not (stated := read_metric(text)):
            if not before.rpartition(b"\r")[2]:
                message = f" printed a metric that can't be read: {why_unread(text)}; it was {text[:SHOWN]!r}"
                yield from self._report_once(rank, named_in(text), why_unread(text), message)
            return
        key = stated.name, stated.unit
        if key not in self._found and len(self._found) >= MAX_METRICS:
            message = f" printed more than {MAX_METRICS} metrics; further metrics are ignored"
            yield from self._report_once(rank, "", message, message)
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

    def _report_once(self, rank: int, name: str, cause: str, message: str) -> Iterator[str]:
        """Yield the message once for each name and cause."""
        reported = self._reported.setdefault(rank, set())
        if (name, cause) not in reported and len(reported) < MAX_REPORTED:
            reported.add((name, cause))
            yield message

    def rates(self) -> str:
        """Return the current totals of the first ``BRIEF`` rates as text; empty if there are no rates."""
        found = (
            (name, unit, sum(each.sum / each.count for each in ranks.values()))
            for (name, unit), ranks in self._found.items()
            if _RATE.fullmatch(unit)
        )
        return FIGURES.join(
            f"{name} {number_text(total)} {unit}" for name, unit, total in islice(found, BRIEF)
        )

    def summary(self) -> tuple[Metric, ...]:
        """Return all metrics, in the order in which they were first printed."""
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
    """Return a quantile of weighted values, linearly interpolated between neighbours.

    ``ordered`` has pairs of a value and its weight, sorted by value.  Each value counts as the middle one of
    ``weight`` values.  ``share`` is between 0 and 1.
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
"""From this value on, numbers are written with an exponent."""

BRIEF = 2
"""Maximum number of metrics in a job's line."""

FIGURES = " · "
"""Separator between metrics in a line."""


def headline_figure(metric: Metric) -> tuple[str, float]:
    """Return the statistic that summarizes a metric (``in all``, ``median`` or ``mean``) and its value."""
    if metric.total is not None:
        return "in all", metric.total
    return ("median", metric.median) if _TIMES.fullmatch(metric.unit) else ("mean", metric.mean)


def in_brief(metrics: Sequence[Metric]) -> str:
    """Return up to ``BRIEF`` metrics, rates first and then times: ``throughput 1,234 samples/s · …``."""
    order = ("in all", "median", "mean")
    chosen = sorted(metrics, key=lambda metric: order.index(headline_figure(metric)[0]))[:BRIEF]
    return FIGURES.join(f"{metric.name} {with_unit(headline_figure(metric)[1], metric)}" for metric in chosen)


def with_unit(number: float, metric: Metric) -> str:
    """Return a number with the metric's unit: ``"203,520 samples/s"``."""
    return f"{number_text(number)} {metric.unit}".rstrip()


def metrics_table(metrics: Sequence[Metric], noun: str) -> str:
    """Return a line for each metric: its summary, and the number of programs that printed it.

    ``noun`` is the noun for a program: rank or instance.
    """
    width = max((len(metric.name) for metric in metrics), default=0)
    lines = (f"cpulaunch: {metric.name:{width}}  {_words(metric, noun)}\n" for metric in metrics)
    return "".join(lines)


def _words(metric: Metric, noun: str) -> str:
    of = counted(metric.ranks, noun)
    if metric.values > metric.ranks:
        of = f"{metric.values:,} values of {of}"
    if metric.values > 1:
        of += f", {number_text(metric.least)} to {number_text(metric.most)}"
    what, number = headline_figure(metric)
    main = with_unit(number, metric)
    if what == "median" and metric.sample is not None:
        of += f"; percentiles of a sample of {metric.sample:,}"
    if what == "in all":
        return f"{main} {what} ({of})"
    if what == "median":
        return f"{what} {main}, 99th percentile {with_unit(metric.p99, metric)} ({of})"
    return f"{what} {main} ({of})"


def number_text(value: float) -> str:
    """Return a number with four significant digits: ``"0.0584"``.

    Numbers from 1000 on have all digits before the decimal point: ``"203,520"``.  Numbers from ``MANY`` on
    have an exponent.
    """
    if abs(value) >= MANY:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
