"""Logs the changes that cpulaunch makes to a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cpulaunch.runtime.log import log_once

precision_owners: list[Callable[[Any], bool]] = []
"""Functions that return whether a library, or ``cpulaunch.prepare``, sets the precision of a model."""


_announced: list[str] = []  # changes that were logged
with_group: list[str] = []  # changes to log when the current library has created its process group
with_step: list[str] = []  # changes to log at the first optimizer step


def announce(*changes: str) -> None:
    """Log changes, each once per process."""
    new = [change for change in changes if change not in _announced]
    if not new:
        return
    hint = "" if _announced else " (--as-written leaves the script alone)"
    _announced.extend(new)
    log_once(f"changed in this script: {'; '.join(new)}{hint}")


def announce_with_step(change: str) -> None:
    """Announce a change at the first optimizer step, in one line with the others."""
    if change not in with_step:
        with_step.append(change)


@contextmanager
def announce_with_group(change: str) -> Iterator[None]:
    """Announce ``change`` if a process group is created in this context."""
    with_group.append(change)
    try:
        yield
    finally:
        with_group.remove(change)
