"""What a patch of a library is, and what patches tell people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings


class Change(NamedTuple):
    """One change of a library's module.

    ``needs``: names in the module, with dots, that ``apply`` replaces or uses.  ``without`` is what happens
    where one of them is missing, and completes "so …".  ``apply`` gets the module and the settings of this
    rank, whose ``backend`` and ``precision`` are not None.
    """

    needs: tuple[str, ...]
    without: str
    apply: Callable[[Any, TrainingSettings], None]


def apply_changes(
    library: str, changes: Iterable[Change], module: ModuleType, settings: TrainingSettings
) -> None:
    """Make those changes of ``module`` for which all names are there; log one line for each of the others."""
    for change in changes:
        if missing := [name for name in change.needs if not _has(module, name)]:
            log_once(
                f"{library} {_version(library)} has no {', '.join(missing)} in {module.__name__}, "
                f"so {change.without}"
            )
        else:
            change.apply(module, settings)


def _has(module: ModuleType, name: str) -> bool:
    """Whether ``module`` has a name; a submodule counts even where its package has deleted its name."""
    try:
        attrgetter(name)(module)
    except AttributeError:
        parent, _, last = name.rpartition(".")
        submodule = sys.modules.get(f"{module.__name__}.{parent}")
        return submodule is not None and hasattr(submodule, last)
    return True


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "(of unknown version)"


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
