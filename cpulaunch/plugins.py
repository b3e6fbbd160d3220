"""Objects found by name: those of cpulaunch by a table, others by the entry points of installed packages.

Nothing is imported before it is asked for by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from cpulaunch.errors import UsageError, did_you_mean


def load(group: str, name: str, built_in: Mapping[str, str]) -> Any:
    """The object called ``name``: of ``built_in`` (name → ``"module:attribute"``), or of an entry point.

    ``group`` is the group of entry points, such as ``cpulaunch.launchers``.  Raises UsageError where there
    is no such name, and whatever an entry point's own module raises when it is imported.
    """
    if name in built_in:
        module, _, attribute = built_in[name].partition(":")
        return getattr(import_module(module), attribute)
    for entry in entry_points(group):
        if entry.name == name:
            return entry.load()
    known = [*built_in, *(entry.name for entry in entry_points(group))]
    raise UsageError(
        f"nothing is called {name!r} in {group}{did_you_mean(name, known)}", hint=f"known: {', '.join(known)}"
    )


def entry_points(group: str) -> list[Any]:
    """What installed packages offer in ``group``."""
    from importlib import metadata  # takes 15 ms, and most jobs name none of these

    return list(metadata.entry_points(group=group))
