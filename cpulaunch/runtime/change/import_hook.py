"""Calls a function when a module has been imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Function = Callable[[ModuleType], None]


def after_import(name: str, function: Function) -> None:
    """Call ``function`` with the module when it is imported; now, if it has been imported already."""
    module = sys.modules.get(name)
    if module is None:
        _finder.functions.setdefault(name, []).append(function)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    elif getattr(module.__spec__, "_initializing", False):
        _call_at_end(module.__spec__, function)
    else:
        function(module)


class _Finder(MetaPathFinder):
    """Finds the modules in ``functions`` with other finders, and wraps their loaders in ``_Loader``."""

    def __init__(self) -> None:
        self.functions: dict[str, list[Function]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.functions:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.functions[name])
                return spec
        return None


_finder = _Finder()


class _Loader(Loader):
    """Loads a module with another loader, and then calls functions."""

    def __init__(self, loader: Any, functions: Sequence[Function]) -> None:
        self._loader, self._functions = loader, functions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for function in self._functions:
            function(module)


def _call_at_end(spec: Any, function: Function) -> None:
    """Call ``function`` at the end of the running import of the module of ``spec``.

    The import ends when Python sets the spec's ``_initializing`` to False (3.10 to 3.14,
    ``importlib._bootstrap._load_unlocked``), so the spec gets a class with a property of this name.
    """
    plain = type(spec)

    def set_initializing(self: Any, value: bool) -> None:
        self.__class__ = plain
        self._initializing = value
        if not value and self.name in sys.modules:  # the module is absent if its import failed
            function(sys.modules[self.name])

    spec.__class__ = type(
        plain.__name__, (plain,), {"_initializing": property(lambda self: True, set_initializing)}
    )
