"""Registers the backend ``ccl`` with torch, in an entry point that ``import torch`` calls.

Compiled code is loaded when the first ccl group is made.
"""

from __future__ import annotations

import sys
from typing import Any

BACKEND = "ccl"


def autoload() -> None:
    """Register ``ccl`` at the end of torch's import (entry point ``torch.backends``).  Raises nothing."""
    try:
        _register()
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
        print(f"cpulaunch: warning: there is no backend ccl: {error}", file=sys.stderr)


def _register() -> None:
    from torch import distributed

    if distributed.is_available():
        distributed.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def create(options: Any, backend_options: Any = None) -> Any:
    """Create a process group.  torch calls this function for the backend ``ccl``."""
    from cpulaunch.ccl.create import create as create_group

    return create_group(options, backend_options)


def take_name_back() -> None:
    """Register ``ccl`` again after Intel's bindings have registered theirs under this name."""
    from torch import distributed

    from cpulaunch.ccl import bindings

    bindings.replaced = distributed.Backend._plugins[BACKEND.upper()]
    _register()
