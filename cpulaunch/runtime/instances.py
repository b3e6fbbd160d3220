"""For programs of which many instances run: shares of the work, and figures that add up.  Without torch."""

from __future__ import annotations

import os
import sys
from typing import Any, TypeVar

from cpulaunch import variables
from cpulaunch.errors import UsageError
from cpulaunch.metric_line import Stated, metric_line

Items = TypeVar("Items")


def shard(items: Items) -> Items:
    """This process's share of ``items``: every N-th of them, for the first of N instances from the first on.

    ``items`` is anything that can be sliced with a step: a list, a tuple, a range, an array.  The shares of
    all instances together are ``items``, and differ by one in length at most.  The ranks of a job share them
    in the same way, and a program that runs by itself gets all.  Raises UsageError for what can't be sliced.
    """
    number, count = _place()
    try:
        return items[number::count]  # type: ignore[index,no-any-return]
    except TypeError:
        raise UsageError(
            f"cpulaunch.shard: it can't slice this {type(items).__name__}", hint="list(…) makes a list of it"
        ) from None


def _place() -> tuple[int, int]:
    """This process's number, and how many there are."""
    for number, count in ((variables.INSTANCE, variables.INSTANCES), ("RANK", "WORLD_SIZE")):
        if number in os.environ and count in os.environ:
            return int(os.environ[number]), int(os.environ[count])
    return 0, 1


def metric(name: str, value: Any, unit: str = "") -> None:
    """State a figure, which cpulaunch adds to those of the other instances: docs/inference.md says how.

    It is a line on stdout, ``CPULAUNCH_METRIC name=value unit``, which other programs may print, too.
    ``value`` is anything that ``float`` takes.  Raises UsageError for a name with a space in it, and for a
    value that is not finite.
    """
    sys.stdout.write(metric_line(Stated(name, float(value), unit)) + "\n")
    sys.stdout.flush()
