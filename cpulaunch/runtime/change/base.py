"""What is changed in a script, as people are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cpulaunch.runtime.log import log_once

precision_owners: list[Callable[[Any], bool]] = []
"""Functions that tell whether a library, or ``cpulaunch.prepare``, sees to the precision of a model."""


_announced: list[str] = []  # what this script was told that cpulaunch changes
_pending: list[str] = []  # changes by a library that is making its process group now
_with_step: list[str] = []  # changes of training that are told when an optimizer first steps


def announce(*changes: str) -> None:
    """Log what is changed in this script, each change once."""
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
    """The changes that are to be announced with a step."""
    return tuple(_with_step)


def pending_changes() -> tuple[str, ...]:
    """The changes of all ``announced_with_group`` that are entered."""
    return tuple(_pending)


@contextmanager
def announced_with_group(change: str) -> Iterator[None]:
    """Have a process group that is made in this context announce ``change``, too."""
    _pending.append(change)
    try:
        yield
    finally:
        _pending.remove(change)
