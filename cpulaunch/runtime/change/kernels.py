"""Enables the compiled kernels, which replace some of torch's operations in the native engine."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from cpulaunch.errors import HostError
from cpulaunch.kernels import load
from cpulaunch.runtime.change.base import announce_with_step
from cpulaunch.runtime.change.import_hook import after_import
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings
from cpulaunch.wording import listed

IPEX = "intel_extension_for_pytorch"

are_enabled = False

_torchs_dropout = torch.nn.functional.dropout


def use_kernels(module: Any, settings: TrainingSettings) -> None:
    """Enable the kernels if the engine may be native."""
    if settings.engine in ("auto", "native"):
        enable()


def enable() -> None:
    """Enable the kernels if they are built; otherwise, log why not.

    They are disabled when IPEX is imported, which has its own kernels.
    """
    if IPEX in sys.modules:
        return
    try:
        operations = load.load()
    except HostError as error:
        log_once(f"training steps use torch alone, without cpulaunch's kernels: {error}")
        return
    global are_enabled
    are_enabled = True
    operations.use(True)
    torch.nn.functional.dropout = _dropout
    _add_hooks()


def _disable(ipex: Any) -> None:
    global are_enabled
    are_enabled = False
    load.load().use(False)
    torch.nn.functional.dropout = _torchs_dropout


@functools.cache
def _add_hooks() -> None:
    """Disable the kernels when IPEX is imported; announce them at the first optimizer step."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _announce())
    after_import(IPEX, _disable)


@functools.cache
def _announce() -> None:
    if names := load.replaced():
        unit = load.load().vector_unit()
        announce_with_step(f"{listed(names)} by cpulaunch's kernels ({unit})")


# torch.jit.script compiles this function, so it needs annotations, and can't use functools.wraps.
def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Replace torch's dropout, which torch.compile would decompose into other operations."""
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        dropped = _dropout_in_graph(input, p, training, inplace)
        if dropped is not None:
            return dropped
    return _torchs_dropout(input, p, training, inplace)


def _dropout_in_graph(input: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor | None:
    """Return the kernel's dropout in torch.compile, under the conditions of csrc/dropout.cpp; else None."""
    if type(input).__name__ not in ("FakeTensor", "FunctionalTensor") or torch.compiler.is_exporting():
        return None
    if torch._C._functorch.maybe_current_level() is not None:
        return None  # in a transform of torch.func
    dense = input.device.type == "cpu" and input.dtype in (torch.float32, torch.bfloat16)
    if not (training and not inplace and 0 < p < 1 and dense and input.is_contiguous() and input.numel() > 0):
        return None
    # Without an argument from randint, torch.compile would merge equal calls into one.
    seed = torch.randint(1 << 62, (1,))
    dropped: torch.Tensor = torch.ops.cpulaunch.dropout(input, seed, p)
    return dropped
