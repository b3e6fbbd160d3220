"""Engines, which are found by name.

Other packages add engines by entry points in the group ``cpulaunch.engines``; each names a ``base.Engine``.
"""

from __future__ import annotations

from cpulaunch import plugins
from cpulaunch.errors import UsageError
from cpulaunch.runtime.change.engines.base import Engine


def load(name: str) -> Engine:
    """Import and return an engine.  Raises UsageError if it doesn't exist, or isn't an engine."""
    engine: Engine = plugins.load(plugins.ENGINES, name)
    if missing := [part for part in _PARTS if not hasattr(engine, part)]:
        raise UsageError(f"{name!r} of {plugins.ENGINES} is not an engine: it lacks {', '.join(missing)}")
    return engine


_PARTS = sorted({*Engine.__annotations__, *(name for name in vars(Engine) if name[0] != "_")})
