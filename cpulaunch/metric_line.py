"""Formats and parses metric lines, which programs print to stdout: ``CPULAUNCH_METRIC name=value unit``."""

from __future__ import annotations

import re
from typing import NamedTuple

from cpulaunch.errors import UsageError

BEGINS = "CPULAUNCH_METRIC "
WORD = BEGINS.rstrip()

MAX_LINE = 256
"""Maximum characters of a metric line."""

LARGEST = 1e100
"""Maximum absolute value, which keeps sums finite."""

_NAME = re.compile(r"[\w.:/%@-]{1,64}")
_UNIT = re.compile(r"(?=.{0,32}$)(per \S+|\S+( per \S+| ?/ ?\S+)?)?")
_LINE = re.compile(r"(?P<name>[^=\s]*)=(?P<value>\S+)(?:\s+(?P<unit>.*))?")

_NAMES = "letters, digits and _ . : / % @ -, at most 64"
_UNITS = "a unit is one such as samples/s, images per second or ms"


class MetricValue(NamedTuple):
    """The contents of a metric line; ``unit`` may be empty."""

    name: str
    value: float
    unit: str


def metric_line(metric: MetricValue) -> str:
    """Return a metric line, without a line end.  Raises UsageError if the name or the unit is invalid.

    A value that is not finite is allowed: the reader reports it.
    """
    if not _NAME.fullmatch(metric.name):
        raise UsageError(f"{metric.name!r} can't be the name of a metric", hint=_NAMES)
    if not _UNIT.fullmatch(metric.unit):
        raise UsageError(f"{metric.unit!r} can't be the unit of a metric", hint=_UNITS)
    return f"{BEGINS}{metric.name}={metric.value:.10g} {metric.unit}".rstrip()


def read_metric(line: str) -> MetricValue | None:
    """Parse a line that begins with ``WORD``; None if it is malformed."""
    found = _parts(line)
    return None if found is None or _wrong(line, found) else _metric(found)


def is_metric(line: bytes) -> bool:
    """Return whether a line that begins with ``WORD`` is well-formed."""
    return read_metric(line.decode(errors="replace")) is not None


def named_in(line: str) -> str:
    """Return the metric's name in a line that may be malformed; empty if there is none."""
    found = _parts(line)
    return found["name"] if found else ""


def why_unread(line: str) -> str:
    """Return why a line is malformed, without quoting its value."""
    found = _parts(line)
    return (_wrong(line, found) if found else "") or f"expected {BEGINS}name=number unit"


def _parts(line: str) -> re.Match[str] | None:
    return _LINE.fullmatch(line.removeprefix(WORD).strip())


def _wrong(line: str, found: re.Match[str]) -> str:
    if not _NAME.fullmatch(found["name"]):
        return f"a name has {_NAMES}"
    if not _UNIT.fullmatch(found["unit"] or ""):
        return _UNITS
    if len(line) > MAX_LINE:
        return f"a line has at most {MAX_LINE} characters"
    try:
        value = float(found["value"])
    except ValueError:
        return "its value is not a number"
    return "" if abs(value) <= LARGEST else f"a value must be finite, and at most {LARGEST:g}"


def _metric(found: re.Match[str]) -> MetricValue:
    return MetricValue(found["name"], float(found["value"]), found["unit"] or "")
