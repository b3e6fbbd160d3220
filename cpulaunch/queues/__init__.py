"""Queues, to which ``cpulaunch submit`` sends jobs: one package for each, found by name, imported when used.

``base`` has the interface.  A package can add a queue by an entry point in the group ``cpulaunch.queues``
whose object is a `base.Queue`; ``submit --to NAME`` then accepts its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpulaunch import plugins
from cpulaunch.errors import UsageError

if TYPE_CHECKING:
    from cpulaunch.queues.base import Queue


def names() -> list[str]:
    """The names of all queues that ``--to`` accepts; the first is the default."""
    return plugins.names(plugins.QUEUES)


def load(name: str) -> Queue:
    """The queue called ``name``.  Raises UsageError if there is none, or if it isn't a `Queue`."""
    from cpulaunch.queues.base import Queue

    queue = plugins.load(plugins.QUEUES, name)
    if not isinstance(queue, Queue):
        raise UsageError(
            f"{name!r} of {plugins.QUEUES} is not a Queue, but of type {type(queue).__name__}",
            hint="an entry point must name an instance of a class derived from queues.base.Queue",
        )
    return queue
