"""Loads the compiled kernels, and reports which of torch's operations they replace."""

from __future__ import annotations

from functools import cache
from typing import Any

from cpulaunch.ccl import installed
from cpulaunch.errors import HostError


@cache
def load() -> Any:
    """Load the kernels and return the namespace ``torch.ops.cpulaunch``; they are not enabled yet.

    Raises HostError if they are not built for the installed torch or do not load.
    """
    import torch

    state = installed.state()
    part = state.part("kernels")
    if part is None:
        raise HostError(f"{state.kernels_problem}", hint="`cpulaunch ccl build` builds them.")
    try:
        torch.ops.load_library(str(part.file))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise HostError(f"{error}", hint="Rebuild them: `cpulaunch ccl build --force`.") from error
    return torch.ops.cpulaunch


def replaced() -> list[str]:
    """Return the operations that the kernels have computed in this process, such as ``["dropout"]``."""
    return list(load().replaced())
