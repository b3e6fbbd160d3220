"""``shard`` and ``metric``, for programs that run as several instances.  Needs no torch."""

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
    """Return this process's share of ``items``: instance K of N gets items K, K + N, K + 2N, …

    ``items`` is a list, a tuple, a range, an array, or another object that can be sliced with a step.  Ranks
    of a job share in the same way, including ranks that srun or mpiexec started.  A program that runs alone
    gets all items.  Raises UsageError if ``items`` can't be sliced.
    """
    number, count = _number_and_count()
    try:
        return items[number::count]  # type: ignore[index,no-any-return]
    except TypeError:
        raise UsageError(
            f"cpulaunch.shard: a {type(items).__name__} can't be sliced", hint="pass list(…) of it"
        ) from None


def _number_and_count() -> tuple[int, int]:
    """Return this process's number, and the number of processes."""
    for number, count in ((variables.INSTANCE, variables.INSTANCES), ("RANK", "WORLD_SIZE")):
        if number in os.environ and count in os.environ:
            return int(os.environ[number]), int(os.environ[count])
    started = other_launchers_rank()
    return (started.rank, started.size) if started else (0, 1)


def metric(name: str, value: Any, unit: str = "") -> None:
    """Report a figure; cpulaunch adds up the figures of all instances (see docs/inference.md).

    Prints ``CPULAUNCH_METRIC name=value unit`` on stdout, as programs in other languages may do.  ``value``
    is a number, or an object that ``float`` accepts.  A value that isn't finite is reported, but not added.
    Raises UsageError if ``value`` isn't a number, or if ``name`` contains a space.
    """
    for what, text in (("name", name), ("unit", unit)):
        if not isinstance(text, str):
            raise UsageError(f"cpulaunch.metric: the {what} must be a string, got {text!r}")
    try:
        number = float(value)
    except OverflowError:  # raised for an int that is too large
        number = inf if value > 0 else -inf
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError
        raise UsageError(
            f"cpulaunch.metric: the value of {name!r} must be a number, got a {type(value).__name__}",
            hint="pass an object that float() accepts, such as a tensor with one element",
        ) from None
    sys.stdout.write(metric_line(MetricValue(name, number, unit)) + "\n")
    sys.stdout.flush()
