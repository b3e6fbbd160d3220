"""A line on a program's stdout that states a figure: ``CPULAUNCH_METRIC name=value unit``."""

from __future__ import annotations

import re
from typing import NamedTuple

from cpulaunch.errors import UsageError

BEGINS = "CPULAUNCH_METRIC "
WORD = BEGINS.rstrip()

MAX_LINE = 256
"""Characters of such a line; a longer one is none."""

LARGEST = 1e100
"""The largest value, so that sums of very many are finite."""

_NAME = re.compile(r"[\w.:/%@-]{1,64}")
_UNIT = re.compile(r"(?=.{0,32}$)(per \S+|\S+( per \S+| ?/ ?\S+)?)?")
_STATED = re.compile(r"(?P<name>[^=\s]*)=(?P<value>\S+)(?:\s+(?P<unit>.*))?")

_NAMES = "letters, digits and _ . : / % @ -, at most 64"
_UNITS = "one such as samples/s, images per second or ms"


class Stated(NamedTuple):
    """What a line states; ``unit`` may be empty."""

    name: str
    value: float
    unit: str


def metric_line(stated: Stated) -> str:
    """The line, without its end, also where the value is no finite number: a reader says so, and goes on.

    Raises UsageError where name or unit can't be read.
    """
    if not _NAME.fullmatch(stated.name):
        raise UsageError(f"{stated.name!r} can't be the name of a metric", hint=_NAMES)
    if not _UNIT.fullmatch(stated.unit):
        raise UsageError(f"{stated.unit!r} can't be the unit of a metric", hint=_UNITS)
    return f"{BEGINS}{stated.name}={stated.value:.10g} {stated.unit}".rstrip()


def read_metric(line: str) -> Stated | None:
    """What ``line``, which begins as such a one, states; None where it isn't whole, or no such number."""
    found = _parts(line)
    return None if found is None or _wrong(line, found) else _stated(found)


def is_metric(line: bytes) -> bool:
    """Whether ``line``, which begins as such a one, states a figure."""
    return read_metric(line.decode(errors="replace")) is not None


def named_in(line: str) -> str:
    """The name in a line, even if that can't be read; empty where there is none."""
    found = _parts(line)
    return found["name"] if found else ""


def why_unread(line: str) -> str:
    """What is wrong with a line for which `read_metric` returns None, without its number."""
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
