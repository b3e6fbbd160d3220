"""Logs the changes that cpulaunch makes to a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cpulaunch.runtime.log import log_once

precision_owners: list[Callable[[Any], bool]] = []
"""Functions that return whether a library, or ``cpulaunch.prepare``, sets the precision of a model."""


_announced: list[str] = []  # changes that were logged in this process
_pending: list[str] = []  # changes to log when the current library has created its process group
_with_step: list[str] = []  # changes to log at the first optimizer step


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
    if change not in _with_step:
        _with_step.append(change)


def step_changes() -> tuple[str, ...]:
    """Return the changes to announce at the first optimizer step."""
    return tuple(_with_step)


def pending_changes() -> tuple[str, ...]:
    """Return the changes to announce when a process group is created."""
    return tuple(_pending)


@contextmanager
def announce_with_group(change: str) -> Iterator[None]:
    """Announce ``change`` if a process group is created in this context."""
    _pending.append(change)
    try:
        yield
    finally:
        _pending.remove(change)
