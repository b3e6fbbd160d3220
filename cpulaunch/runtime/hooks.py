"""Replacements of attributes of torch and of other libraries.

`scripts/hooks_page.py` lists all changes in docs/scripts.md.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from importlib import import_module, metadata
from typing import Any, NamedTuple

from cpulaunch.runtime.log import log_once


class Change(NamedTuple):
    """One change of a module.

    ``apply(module, context)`` makes the change.  ``replaces`` are the dotted names in the module that it
    replaces, and ``uses`` the names that it reads; a name in another module of the library begins with the
    library's name.  ``what`` is the purpose, as docs/scripts.md shows it.  ``without`` is the consequence if
    a name is missing; it completes a warning that ends in "so …".
    """

    replaces: tuple[str, ...]
    uses: tuple[str, ...]
    what: str
    without: str
    apply: Callable[[Any, Any], None]

    @property
    def needs(self) -> tuple[str, ...]:
        """All names that the change needs."""
        return (*self.replaces, *self.uses)


def apply_changes(library: str, changes: Iterable[tuple[Change, Any]], module: Any) -> None:
    """Make the changes of ``module``, each with its context.

    If the module lacks a name, or a change fails, a warning names the consequence, and the job continues:
    many of these names are private.
    """
    missing: dict[str, list[str]] = {}
    usable = []
    for change, context in changes:
        if absent := next(filter(None, (_missing(module, name) for name in change.needs)), ""):
            missing.setdefault(absent, []).append(change.without)
        else:
            usable.append((change, context))
    for name, consequences in missing.items():
        log_once(f"warning: {_titled(library)} has no {name}, so {'; '.join(dict.fromkeys(consequences))}")
    for change, context in usable:
        try:
            change.apply(module, context)
        except Exception as e:
            log_once(f"warning: {_titled(library)}: {type(e).__name__}: {e}, so {change.without}")


def _missing(module: Any, name: str) -> str:
    """Return the shortest prefix of the dotted ``name`` that ``module`` lacks; empty if it has the name.

    A package has its imported submodules, even if it has deleted the attribute.
    """
    library = getattr(module, "__name__", "").partition(".")[0]
    if library and name.startswith(f"{library}."):
        missing = _missing(import_module(library), name.removeprefix(f"{library}."))
        return missing and f"{library}.{missing}"
    found, parts = module, name.split(".")
    for count, part in enumerate(parts, 1):
        path = ".".join(parts[:count])
        try:
            found = getattr(found, part)
        except AttributeError:
            found = sys.modules.get(f"{getattr(module, '__name__', '')}.{path}")
            if found is None:
                return path
    return ""


def _titled(library: str) -> str:
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        return library


def replace_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replace a function of torch.distributed in all of its modules that have imported it by name."""
    name = original.__name__
    for path, module in list(sys.modules.items()):
        if path.startswith("torch.distributed") and vars(module).get(name) is original:
            setattr(module, name, replacement)


def bound_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return a call's arguments by name; None if they don't fit: torch then reports this itself."""
    try:
        return signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return None
