"""Loads the compiled kernels, and says which of torch's operations they replace."""

from __future__ import annotations

from functools import cache
from typing import Any

from cpulaunch.ccl import installed
from cpulaunch.errors import HostError


@cache
def load() -> Any:
    """The namespace ``torch.ops.cpulaunch``, once the kernels are loaded; they replace nothing yet.

    Raises HostError where they are not built for the installed torch or do not load.
    """
    import torch

    there = installed.state()
    part = there.part("kernels")
    if part is None:
        raise HostError(f"{there.kernels_problem}", hint="`cpulaunch ccl build` builds them.")
    try:
        torch.ops.load_library(str(part.file))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise HostError(f"{error}", hint="Build them anew: `cpulaunch ccl build --force`.") from error
    return torch.ops.cpulaunch


def replaced() -> list[str]:
    """What the kernels have computed in torch's place in this process, so far: ``["dropout"]``."""
    return list(load().replaced())
