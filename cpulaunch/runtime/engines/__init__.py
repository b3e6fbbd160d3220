"""Engines, found by name and imported when they are used.

Another package adds one by an entry point in the group ``cpulaunch.engines``, which names an object that has
what ``base.Engine`` says.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from cpulaunch.errors import UsageError, did_you_mean
from cpulaunch.runtime.engines.base import Engine

BUILT_IN = {
    "native": "cpulaunch.runtime.engines.native:ENGINE",
    "ipex": "cpulaunch.runtime.engines.ipex:ENGINE",
}
GROUP = "cpulaunch.engines"


def load(name: str) -> Engine:
    """The engine of this name.  Raises UsageError where there is none, or where it can't be imported."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        engine: Engine = getattr(import_module(module), attribute)
        return engine
    found = entry_points(group=GROUP)
    if name not in found.names:
        valid = sorted({*BUILT_IN, *found.names})
        raise UsageError(
            f"there is no engine {name!r}{did_you_mean(name, valid)}; installed are {', '.join(valid)}"
        )
    entry = found[name]
    try:
        engine = entry.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the engine {name} ({entry.value}) can't be imported: {error}") from error
    if missing := [part for part in _PARTS if not hasattr(engine, part)]:
        raise UsageError(f"{entry.value} is no engine: it lacks {', '.join(missing)}")
    return engine


_PARTS = sorted({*Engine.__annotations__, *(name for name in vars(Engine) if name[0] != "_")})
