"""Shares of work and added-up figures, for programs that run as several instances.  Needs no torch."""

from __future__ import annotations

import os
import sys
from math import inf
from typing import Any, TypeVar

from cpulaunch import variables
from cpulaunch.errors import UsageError
from cpulaunch.metric_line import MetricValue, metric_line
from cpulaunch.runtime.join import other_launchers_rank

Items = TypeVar("Items")


def shard(items: Items) -> Items:
    """Return this process's share of ``items``: with N instances, every N-th item.

    The first instance starts at the first item, the second at the second, and so on.  ``items`` is anything
    that can be sliced with a step: a list, a tuple, a range, an array.  The shares cover ``items``, and their
    lengths differ by at most one.  The ranks of a job share in the same way, including ranks that srun or
    mpiexec started; a program that runs alone gets everything.  Raises UsageError for what can't be sliced.
    """
    number, count = _place()
    try:
        return items[number::count]  # type: ignore[index,no-any-return]
    except TypeError:
        raise UsageError(
            f"cpulaunch.shard: it can't slice this {type(items).__name__}", hint="list(…) makes a list of it"
        ) from None


def _place() -> tuple[int, int]:
    """Return this process's number, and the number of processes."""
    for number, count in ((variables.INSTANCE, variables.INSTANCES), ("RANK", "WORLD_SIZE")):
        if number in os.environ and count in os.environ:
            return int(os.environ[number]), int(os.environ[count])
    started = other_launchers_rank()
    return (started.rank, started.size) if started else (0, 1)


def metric(name: str, value: Any, unit: str = "") -> None:
    """Report a figure, which cpulaunch adds to those of the other instances (see docs/inference.md).

    Prints ``CPULAUNCH_METRIC name=value unit`` on stdout; other programs may print such lines, too.
    ``value`` is anything that ``float`` accepts.  cpulaunch reports a value that is not finite, and counts
    the others.  Raises UsageError for a value that is not a number, and for a name that contains a space.
    """
    for what, text in (("name", name), ("unit", unit)):
        if not isinstance(text, str):
            raise UsageError(f"cpulaunch.metric: the {what} is text, not {text!r}")
    try:
        number = float(value)
    except OverflowError:  # raised for an int that is too large
        number = inf if value > 0 else -inf
    except (TypeError, ValueError, RuntimeError):  # RuntimeError is torch's
        raise UsageError(
            f"cpulaunch.metric: the value of {name!r} is a number, not this {type(value).__name__}",
            hint="anything that float() takes, such as a tensor of one element",
        ) from None
    sys.stdout.write(metric_line(MetricValue(name, number, unit)) + "\n")
    sys.stdout.flush()
