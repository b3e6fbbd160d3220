"""Engines, found by name and imported when they are used.

Another package adds an engine by an entry point in the group ``cpulaunch.engines``, which names an object
that implements ``base.Engine``.
"""

from __future__ import annotations

from cpulaunch import plugins
from cpulaunch.errors import UsageError
from cpulaunch.runtime.change.engines.base import Engine


def load(name: str) -> Engine:
    """Return the engine of this name.  Raises UsageError if there is none, or if it isn't an engine."""
    engine: Engine = plugins.load(plugins.ENGINES, name)
    if missing := [part for part in _PARTS if not hasattr(engine, part)]:
        raise UsageError(f"{name!r} of {plugins.ENGINES} is not an engine: it lacks {', '.join(missing)}")
    return engine


_PARTS = sorted({*Engine.__annotations__, *(name for name in vars(Engine) if name[0] != "_")})
