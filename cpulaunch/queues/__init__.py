"""Queues receive the jobs of ``cpulaunch submit``.  A queue's package is imported when the queue is used.

The interface is `base.Queue`.  Another package can provide a `Queue` as an entry point in the group
``cpulaunch.queues``; ``submit --to NAME`` then accepts the entry point's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpulaunch import plugins
from cpulaunch.errors import UsageError

if TYPE_CHECKING:
    from cpulaunch.queues.base import Queue


def names() -> list[str]:
    """The names of all queues; the first is the default."""
    return plugins.names(plugins.QUEUES)


def load(name: str) -> Queue:
    """Load the queue ``name``.  Raises UsageError if there is none, or if it isn't a `Queue`."""
    from cpulaunch.queues.base import Queue

    queue = plugins.load(plugins.QUEUES, name)
    if not isinstance(queue, Queue):
        raise UsageError(
            f"{name!r} of {plugins.QUEUES} is not a Queue, but of type {type(queue).__name__}",
            hint="an entry point must name an instance of a class derived from queues.base.Queue",
        )
    return queue
