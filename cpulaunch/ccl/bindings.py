"""Uses Intel's oneccl_bind_pt as the backend ``ccl`` if ``--ccl-binding`` requests it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from cpulaunch.ccl import installed
from cpulaunch.errors import HostError

IMPORT_LIMIT = 120.0  # seconds

replaced: Any = None
"""The bindings' plug-in for torch, which `register.take_name_back` has replaced."""


def are_wanted(binding: str, there: installed.State) -> bool:
    """Return whether ``binding``, the value of the setting ``ccl.binding``, requests Intel's bindings.

    Raises HostError if they can't be used.
    """
    if binding != "oneccl_bind_pt":
        return False
    if not there.bindings_fit:
        raise HostError(
            installed.bindings_advice(there), hint="Without --ccl-binding, ccl is cpulaunch's own."
        )
    return True


def loading_problem() -> str | None:
    """Return why the bindings don't load, or None.  Loading may crash, so another process tries it."""
    command = [sys.executable, "-c", f"import {installed.BINDINGS}"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT)
    except subprocess.TimeoutExpired:
        return f"the import takes over {IMPORT_LIMIT:g} s"
    if tried.returncode == 0:
        return None
    return (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]


def load(there: installed.State) -> Any:
    """Import the bindings, and return their function that creates a group.  Raises HostError on failure."""
    from torch import distributed

    try:
        __import__(installed.BINDINGS)
    except (ImportError, OSError) as error:
        raise HostError(f"oneccl_bind_pt {there.bindings} does not load: {error}") from error
    theirs = replaced or distributed.Backend._plugins["CCL"]
    if theirs.creator_fn.__module__.startswith("cpulaunch."):
        raise HostError(f"{installed.BINDINGS} was imported and registered no backend ccl")
    if theirs.extended_api:
        return theirs.creator_fn
    return lambda o, _: theirs.creator_fn(o.store, o.group_rank, o.group_size, o.timeout)


def package_files(there: installed.State) -> tuple[str, ...]:
    """Return the bindings' files, which must be the same on all hosts."""
    if there.bindings_directory is None:
        return ()
    libraries = sorted((there.bindings_directory / "lib").glob("*.so"))
    return tuple(map(os.fspath, (there.bindings_directory / "__init__.py", *libraries)))
