"""A line on a program's stdout that states a figure: ``CPULAUNCH_METRIC name=value unit``."""

from __future__ import annotations

import re
from typing import NamedTuple

from cpulaunch.errors import UsageError

BEGINS = "CPULAUNCH_METRIC "

MAX_LINE = 256
"""Characters of such a line; a longer one is none."""

LARGEST = 1e100
"""The largest value, so that sums of very many are finite."""

_NAME = re.compile(r"[\w.:/%@-]{1,64}")
_UNIT = re.compile(r"(\S(.{0,30}\S)?)?")
_STATED = re.compile(rf"(?P<name>{_NAME.pattern})=(?P<value>[-+.\w]+)(?: +(?P<unit>{_UNIT.pattern}))?")


class Stated(NamedTuple):
    """What a line states; ``unit`` may be empty."""

    name: str
    value: float
    unit: str


def metric_line(stated: Stated) -> str:
    """The line, without its end.  Raises UsageError where a reader couldn't take it for one."""
    if not _NAME.fullmatch(stated.name):
        raise UsageError(
            f"{stated.name!r} is no name of a metric", hint="letters, digits and _ . : / % @ -, at most 64"
        )
    if not _UNIT.fullmatch(stated.unit):
        raise UsageError(f"{stated.unit!r} is no unit of a metric", hint="one such as samples/s or ms")
    if not abs(stated.value) <= LARGEST:  # nor NaN
        raise UsageError(f"the metric {stated.name} is {stated.value}", hint=f"at most {LARGEST:g}")
    return f"{BEGINS}{stated.name}={stated.value:.10g} {stated.unit}".rstrip()


def read_metric(line: str) -> Stated | None:
    """What ``line``, which begins as such a one, states; None where it isn't whole, or no such number."""
    if len(line) > MAX_LINE or not (found := _STATED.fullmatch(line.removeprefix(BEGINS).strip())):
        return None
    try:
        value = float(found["value"])
    except ValueError:
        return None
    return Stated(found["name"], value, found["unit"] or "") if abs(value) <= LARGEST else None
