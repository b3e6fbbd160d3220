"""The compiled kernels (`cpulaunch ccl build`), in use for one test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cpulaunch.ccl import installed
from cpulaunch.kernels import load
from cpulaunch.runtime.change import kernels


@pytest.fixture
def ops() -> Iterator[Any]:
    """Replace torch's kernels, and return ``torch.ops.cpulaunch``."""
    if problem := installed.state().kernels_problem:
        pytest.fail(f"{problem}: run `cpulaunch ccl build` first")
    threads = torch.get_num_threads()
    kernels.enable()
    yield load.load()
    kernels._disable(None)
    torch.set_num_threads(threads)


class Calls(TorchDispatchMode):
    """The names of the operations that are computed in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def ours(self) -> list[str]:
        return [name for name in self.names if name.startswith("cpulaunch.")]
