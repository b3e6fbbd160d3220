"""Format and parse metric lines, which programs print on stdout: ``CPULAUNCH_METRIC name=value unit``."""

from __future__ import annotations

import re
from typing import NamedTuple

from cpulaunch.errors import UsageError

BEGINS = "CPULAUNCH_METRIC "
WORD = BEGINS.rstrip()

MAX_LINE = 256
"""Maximum characters of a metric line."""

LARGEST = 1e100
"""Maximum absolute value, so that sums of very many values are finite."""

_NAME = re.compile(r"[\w.:/%@-]{1,64}")
_UNIT = re.compile(r"(?=.{0,32}$)(per \S+|\S+( per \S+| ?/ ?\S+)?)?")
_STATED = re.compile(r"(?P<name>[^=\s]*)=(?P<value>\S+)(?:\s+(?P<unit>.*))?")

_NAMES = "letters, digits and _ . : / % @ -, at most 64"
_UNITS = "one such as samples/s, images per second or ms"


class Stated(NamedTuple):
    """Name, value and unit of a metric line; ``unit`` may be empty."""

    name: str
    value: float
    unit: str


def metric_line(stated: Stated) -> str:
    """Return a metric line, without a line end.

    The value is not checked: if it is not finite, the reader reports that and continues.  Raises UsageError
    if the name or the unit is invalid.
    """
    if not _NAME.fullmatch(stated.name):
        raise UsageError(f"{stated.name!r} can't be the name of a metric", hint=_NAMES)
    if not _UNIT.fullmatch(stated.unit):
        raise UsageError(f"{stated.unit!r} can't be the unit of a metric", hint=_UNITS)
    return f"{BEGINS}{stated.name}={stated.value:.10g} {stated.unit}".rstrip()


def read_metric(line: str) -> Stated | None:
    """Parse ``line``, which begins with ``WORD``; None if it is malformed."""
    found = _parts(line)
    return None if found is None or _wrong(line, found) else _stated(found)


def is_metric(line: bytes) -> bool:
    """Whether ``line``, which begins with ``WORD``, is a well-formed metric line."""
    return read_metric(line.decode(errors="replace")) is not None


def named_in(line: str) -> str:
    """Return the name in a line, even if the line is malformed; empty if there is none."""
    found = _parts(line)
    return found["name"] if found else ""


def why_unread(line: str) -> str:
    """Return why `read_metric` returns None for a line.  The text does not quote the value."""
    found = _parts(line)
    return (_wrong(line, found) if found else "") or f"expected {BEGINS}name=number unit"


def _parts(line: str) -> re.Match[str] | None:
    return _STATED.fullmatch(line.removeprefix(WORD).strip())


def _wrong(line: str, found: re.Match[str]) -> str:
    if not _NAME.fullmatch(found["name"]):
        return f"a name is of {_NAMES}"
    if not _UNIT.fullmatch(found["unit"] or ""):
        return f"a unit is {_UNITS}"
    if len(line) > MAX_LINE:
        return f"a line has at most {MAX_LINE} characters"
    try:
        value = float(found["value"])
    except ValueError:
        return "its value is not a number"
    return "" if abs(value) <= LARGEST else f"a value is finite, and at most {LARGEST:g}"


def _stated(found: re.Match[str]) -> Stated:
    return Stated(found["name"], float(found["value"]), found["unit"] or "")
