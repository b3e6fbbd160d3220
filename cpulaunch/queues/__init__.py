"""Where ``cpulaunch submit`` sends jobs: one module or package per queue, found by name and loaded when used.

``base`` is the protocol.  A package adds a queue by an entry point in the group ``cpulaunch.queues`` whose
object is a `base.Queue`; ``submit --to NAME`` then takes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpulaunch import plugins
from cpulaunch.errors import UsageError

if TYPE_CHECKING:
    from cpulaunch.queues.base import Queue


def names() -> list[str]:
    """The queues that ``--to`` takes; the first is the default."""
    return plugins.names(plugins.QUEUES)


def load(name: str) -> Queue:
    """The queue called ``name``.  Raises UsageError where there is none, or where it is no queue."""
    from cpulaunch.queues.base import Queue

    queue = plugins.load(plugins.QUEUES, name)
    if not isinstance(queue, Queue):
        raise UsageError(
            f"{name!r} of {plugins.QUEUES} is not a Queue, but of type {type(queue).__name__}",
            hint="an entry point must name an instance of a class derived from queues.base.Queue",
        )
    return queue
