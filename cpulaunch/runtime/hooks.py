"""Changes of attributes of torch, of libraries and of C++, as tables with the names that they need.

docs/scripts.md lists all of them; `scripts/hooks_page.py` makes that list from these tables.
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

    ``replaces`` lists the names in the module, with dots, that ``apply`` replaces, and ``uses`` those that it
    reads.  Names in another module of the library begin with the library's name.  ``what`` is the purpose, a
    column of docs/scripts.md.  ``without`` completes "so …": what happens if a name is missing.  ``apply``
    gets the module and the context of its table.
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

    A change that lacks a name, or fails, is left out, with one line per missing name about the consequence.
    Neither an import nor a job depends on a private name of another project.
    """
    missing: dict[str, list[str]] = {}
    usable = []
    for change, context in changes:
        if lacking := next(filter(None, (_missing(module, name) for name in change.needs)), ""):
            missing.setdefault(lacking, []).append(change.without)
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
    """Return the shortest prefix of the dotted ``name`` that ``module`` lacks; empty if it has all.

    A submodule counts even if its package has deleted its name.
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
    """Replace a function of torch.distributed in all modules that refer to it.

    ``torch.distributed.device_mesh``, for one, imports some functions by name.
    """
    name = original.__name__
    for path, module in list(sys.modules.items()):
        if path.startswith("torch.distributed") and vars(module).get(name) is original:
            setattr(module, name, replacement)


def arguments_given(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return a call's arguments by name; None if the call is wrong, which torch then reports."""
    try:
        return signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return None
