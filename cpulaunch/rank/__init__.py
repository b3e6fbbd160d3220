"""A rank's keeper, and how it starts the program.  Standard library only.

``cpulaunch.rank()`` of training scripts has this package's name; so the package can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType


class _Callable(ModuleType):
    def __call__(self) -> int:
        from cpulaunch import __getattr__ as public

        number: int = public("rank")()
        return number


sys.modules[__name__].__class__ = _Callable
