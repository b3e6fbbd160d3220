"""Messages about the changes that cpulaunch makes to a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cpulaunch.runtime.log import log_once

precision_owners: list[Callable[[Any], bool]] = []
"""Functions that return whether a library, or ``cpulaunch.prepare``, decides the precision of a model."""


_announced: list[str] = []  # changes logged in this process
_pending: list[str] = []  # changes by a library that is making its process group now
_with_step: list[str] = []  # changes of training, logged when an optimizer first steps


def announce(*changes: str) -> None:
    """Log the changes to this script, each once."""
    new = [change for change in changes if change not in _announced]
    if not new:
        return
    hint = "" if _announced else " (--as-written leaves the script alone)"
    _announced.extend(new)
    log_once(f"changed in this script: {'; '.join(new)}{hint}")


def announce_with_step(change: str) -> None:
    """Announce ``change`` with all others of the first training step, in one line."""
    if change not in _with_step:
        _with_step.append(change)


def step_changes() -> tuple[str, ...]:
    """Return the changes to announce with the first step."""
    return tuple(_with_step)


def pending_changes() -> tuple[str, ...]:
    """Return the changes of all ``announced_with_group`` contexts that are entered."""
    return tuple(_pending)


@contextmanager
def announced_with_group(change: str) -> Iterator[None]:
    """Have a process group that is made in this context also announce ``change``."""
    _pending.append(change)
    try:
        yield
    finally:
        _pending.remove(change)
