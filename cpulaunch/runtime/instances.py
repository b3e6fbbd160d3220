"""For programs of which many instances run: shares of the work, and figures that add up.  Without torch."""

from __future__ import annotations

import os
import sys
from math import inf
from typing import Any, TypeVar

from cpulaunch import variables
from cpulaunch.errors import UsageError
from cpulaunch.metric_line import Stated, metric_line
from cpulaunch.runtime.join import other_launchers_rank

Items = TypeVar("Items")


def shard(items: Items) -> Items:
    """This process's share of ``items``: every N-th of them, for the first of N instances from the first on.

    ``items`` is anything that can be sliced with a step: a list, a tuple, a range, an array.  The shares of
    all instances together are ``items``, and differ by one in length at most.  The ranks of a job share them
    in the same way, also those that srun or an mpiexec started; a program that runs by itself gets all.
    Raises UsageError for what can't be sliced.
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
    started = other_launchers_rank()
    return (started.rank, started.size) if started else (0, 1)


def metric(name: str, value: Any, unit: str = "") -> None:
    """State a figure, which cpulaunch adds to those of the other instances: docs/inference.md says how.

    It is a line on stdout, ``CPULAUNCH_METRIC name=value unit``, which other programs may print, too.
    ``value`` is anything that ``float`` takes.  One that is not finite does no harm: cpulaunch says so, and
    counts the others.  Raises UsageError for a value that is no number, and for a name with a space in it.
    """
    for what, text in (("name", name), ("unit", unit)):
        if not isinstance(text, str):
            raise UsageError(f"cpulaunch.metric: the {what} is text, not {text!r}")
    try:
        number = float(value)
    except OverflowError:  # of an int
        number = inf if value > 0 else -inf
    except (TypeError, ValueError, RuntimeError):  # the last one is torch's
        raise UsageError(
            f"cpulaunch.metric: the value of {name!r} is a number, not this {type(value).__name__}",
            hint="anything that float() takes, such as a tensor of one element",
        ) from None
    sys.stdout.write(metric_line(Stated(name, number, unit)) + "\n")
    sys.stdout.flush()
