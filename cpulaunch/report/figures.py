"""Makes Vega-Lite specifications of a job's figures.  The page's themes have the colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cpulaunch.report.buckets import Floats
from cpulaunch.report.numbers import Numbers, unit_of_memory
from cpulaunch.report.read import Job

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Identifies the version of Vega-Lite; browsers don't fetch it."""

MAX_ROWS = 64
"""Maximum number of rows of a figure.  With more ranks, neighbours share a row."""

MANY_LINES = 8
"""Maximum number of ranks with a line each in the figure of memory."""

Spec = dict[str, Any]
Values = list[dict[str, Any]]

KINDS = {"failure": "mark-failure", "stall": "mark-stall", "restart": "mark-restart"}


class TimeAxis:
    """Time axis in seconds, minutes or hours.

    ``seconds`` is the duration of the longest job, ``first`` the second at which the axis begins.
    """

    def __init__(self, seconds: float, first: float = 0.0) -> None:
        self.first = first
        self.unit, self.scale = ("seconds", 1.0) if seconds < 300 else ("minutes", 60.0)
        if seconds >= 3 * 3600:
            self.unit, self.scale = "hours", 3600.0

    def __call__(self, seconds: float) -> float:
        return rounded(seconds / self.scale)

    def encoding(self, longest: float) -> Spec:
        """Return the encoding of an axis that ends at second ``longest``."""
        return {
            "field": "t",
            "type": "quantitative",
            "title": f"{self.unit} since the start",
            "scale": {"domain": [self(self.first), self(longest)], "nice": False},
        }


def over_time(
    lines: Sequence[tuple[str, Numbers, Floats]],
    title: str,
    axis: TimeAxis,
    *,
    seldom: bool = False,
    zero: bool = True,
    names: Sequence[str] = (),
) -> Spec | None:
    """Return a line chart of one quantity over time; None if there are no values.

    ``lines`` are names, jobs and values.  A chart with one line also has the job's marks.  ``seldom``: the
    line connects values across gaps.  ``zero``: the vertical axis includes 0.  ``names`` are the names of all
    compared jobs, which have the same colours in all charts.
    """
    values: Values = []
    longest = 0.0
    for name, numbers, y in lines:
        longest = max(longest, numbers.longest)
        for t, value in zip(numbers.times, y, strict=True):
            if (known := bool(np.isfinite(value))) or not seldom:
                values.append({"t": axis(t), "y": rounded(value) if known else None, "name": name})
    if not any(value["y"] is not None for value in values):
        return None
    x = axis.encoding(longest)
    shown = [name for name, *_ in lines]
    colour: Spec = {"field": "name", "type": "nominal", "title": None, "sort": None, "legend": None}
    if len(shown) > 1 or names:
        colour["legend"] = {"orient": "top", "labelLimit": 400, "values": shown}
    if names:
        colour["scale"] = {"domain": list(names)}
    tooltip = [
        {"field": "name", "type": "nominal", "title": "of"},
        {"field": "t", "type": "quantitative", "title": axis.unit},
        {"field": "y", "type": "quantitative", "title": title, "format": ",.4~g"},
    ]
    curve: Spec = {
        "data": {"values": values},
        "mark": {"type": "line", "point": {"size": 12} if len(values) < 40 else False},
        "encoding": {
            "x": x,
            "y": {"field": "y", "type": "quantitative", "title": title, "scale": {"zero": zero}},
            "color": colour,
            "tooltip": tooltip,
        },
        "params": [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}],
    }
    layers = [curve, *(_marks(lines[0][1].job, axis, x) if len(lines) == 1 else ())]
    return {**_base(220), "layer": layers}


def heat_map(numbers: Numbers, axis: TimeAxis) -> Spec | None:
    """Return a heat map of the time of a step by rank and time; None if there are no steps.

    Time in which a rank waited for others is subtracted if it is known.  A row of several ranks shows the
    slowest.
    """
    per_step, noun = numbers.own_per_step, numbers.job.names.noun
    if not np.isfinite(per_step).any():
        return None
    rows = list(_rows(numbers))
    values: Values = []
    for name, which in rows:
        group = per_step[which]
        for bucket in range(per_step.shape[1]):
            column = group[:, bucket]
            if np.isfinite(column).any():
                start = numbers.times[bucket] - numbers.width / 2
                values.append(
                    {
                        "r": name,
                        "t": axis(start),
                        "u": axis(start + numbers.width),
                        "ms": rounded(1000 * float(np.nanmax(column))),
                    }
                )
    x = {**axis.encoding(numbers.longest), "axis": {"grid": False}}
    largest = rounded(1000 * float(np.nanpercentile(per_step, 99)))
    smallest = rounded(1000 * float(np.nanmin(per_step)))
    return {
        **_base(max(60, min(420, 26 * len(rows)))),
        "data": {"values": values},
        "mark": {"type": "rect", "clip": True, "stroke": None},
        "encoding": {
            "x": x,
            "x2": {"field": "u"},
            "y": {"field": "r", "type": "ordinal", "sort": None, "title": noun, "axis": {"grid": False}},
            "color": {
                "field": "ms",
                "type": "quantitative",
                "title": "ms",
                "scale": {
                    "domain": [smallest, max(largest, smallest * 1.05)],
                    "clamp": True,
                    "range": "heatmap",
                },
            },
            "tooltip": [
                {"field": "r", "type": "ordinal", "title": noun},
                {"field": "t", "type": "quantitative", "title": axis.unit},
                {"field": "ms", "type": "quantitative", "title": "ms", "format": ",.4~g"},
            ],
        },
    }


def shares(numbers: Numbers) -> Spec | None:
    """Return a stacked bar for each rank with the parts of its time; None if they are unknown."""
    parts, noun = numbers.shares(), numbers.job.names.noun
    if not parts:
        return None
    rows = list(_rows(numbers))
    values = [
        {"r": name, "part": part, "order": order, "share": rounded(float(np.mean(each[which])))}
        for order, (part, each) in enumerate(parts.items())
        for name, which in rows
    ]
    return {
        **_base(max(60, min(420, 26 * len(rows)))),
        "data": {"values": values},
        "mark": {"type": "bar", "cornerRadius": 1},
        "encoding": {
            "x": {
                "field": "share",
                "type": "quantitative",
                "title": "share of the time of its steps",
                "stack": "zero",
                "scale": {"domain": [0, 1], "clamp": True},
                "axis": {"format": ".0%"},
            },
            "y": {"field": "r", "type": "ordinal", "sort": None, "title": noun, "axis": {"grid": False}},
            "color": {
                "field": "part",
                "type": "nominal",
                "sort": list(parts),
                "title": None,
                "legend": {"orient": "top", "columns": 2, "labelLimit": 400},
            },
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [
                {"field": "r", "type": "ordinal", "title": noun},
                {"field": "part", "type": "nominal", "title": "part"},
                {"field": "share", "type": "quantitative", "title": "share", "format": ".1%"},
            ],
        },
    }


def _rows(numbers: Numbers) -> Iterator[tuple[str, slice]]:
    """Yield the rows of a figure: name (``"3"`` or ``"3–5"``) and ranks."""
    ranks, number = numbers.job.buckets.ranks, numbers.job.names.number
    size = -(-ranks // MAX_ROWS)
    for first in range(0, ranks, size):
        last = min(first + size, ranks) - 1
        name = f"{number(first)}" if first == last else f"{number(first)}–{number(last)}"
        yield name, slice(first, last + 1)


def memory(numbers: Numbers, axis: TimeAxis) -> Spec | None:
    """Return a line chart of the ranks' resident memory; None if it is unknown.

    With more than ``MANY_LINES`` ranks, it shows the maximum, the median and the minimum.
    """
    rss = numbers.rss
    if not np.isfinite(rss).any():
        return None
    unit, divisor = unit_of_memory(float(np.nanmax(rss)))
    rss = rss / divisor
    if len(rss) <= MANY_LINES:
        lines = [(numbers.job.names.one(rank), numbers, rss[rank]) for rank in range(len(rss))]
    else:
        seen = np.isfinite(rss).any(axis=0)
        lines = []
        noun = numbers.job.names.noun
        for name, percent in ((f"largest {noun}", 100), ("median", 50), (f"smallest {noun}", 0)):
            y = np.full(rss.shape[1], np.nan)
            y[seen] = np.nanpercentile(rss[:, seen], percent, axis=0)
            lines.append((name, numbers, y))
    return over_time(lines, unit, axis, seldom=True)


def _base(height: int) -> Spec:
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
    }


def _marks(job: Job, axis: TimeAxis, x: Spec) -> Iterator[Spec]:
    """Yield layers of failures, stalls and restarts: vertical lines with tooltips."""
    for kind, style in KINDS.items():
        values = [{"t": axis(mark.seconds), "text": mark.text} for mark in job.marks if mark.kind == kind]
        if values:
            yield {
                "data": {"values": values[:MAX_ROWS]},
                "mark": {"type": "rule", "style": style, "strokeWidth": 2, "clip": True},
                "encoding": {
                    "x": x,
                    "tooltip": [
                        {"field": "text", "type": "nominal", "title": kind},
                        {"field": "t", "type": "quantitative", "title": axis.unit},
                    ],
                },
            }


def rounded(value: float) -> float:
    """Round to four significant digits, to keep the page small."""
    return float(f"{value:.4g}")
