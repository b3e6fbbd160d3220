"""The engines torch and native: autocast, fused optimizers, and channels_last for convolutions.

The engine native also uses cpulaunch's kernels.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from cpulaunch.runtime.change import kernels
from cpulaunch.runtime.change.engines.base import Engine

FUSED = (Adam, AdamW, SGD, Adagrad)
"""Optimizers for which torch has a fused implementation on CPUs."""

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


class TorchEngine(Engine):
    name = "torch"

    def version(self) -> str:
        return torch.__version__

    def apply(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Convert a model with 2-D convolutions to channels_last, in place, and optimize its optimizer."""
        if any(isinstance(module, _CONVOLUTIONS) for module in model.modules()):
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if optimizer is not None:
            fuse(optimizer)
        return model


class NativeEngine(TorchEngine):
    name = "native"

    def apply(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Prepare the model as engine ``torch`` does, and enable the kernels."""
        kernels.enable()
        return super().apply(model, optimizer)


ENGINE = NativeEngine()
TORCH = TorchEngine()
OF_TORCH = (ENGINE.name, TORCH.name)
"""The engines that keep fp32 weights."""

_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_in_step: weakref.WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
"""Optimizer → its groups that `_before_step` has changed to the fused implementation."""


def fuse(optimizer: Optimizer) -> bool:
    """Let the optimizer use torch's fused implementation in each step for which it is right.

    Return False if it does not suit any group now, if the script has chosen an implementation, or if an
    earlier call has done this.  Groups are changed only during a step, so checkpoints have the script's own
    choice.
    """
    if type(optimizer) not in FUSED or optimizer in _watched:
        return False
    _watched.add(optimizer)
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    return any(_suits(optimizer, group) for group in optimizer.param_groups)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    _after_step(optimizer)  # if an error has ended the last step
    _in_step[optimizer] = [group for group in optimizer.param_groups if _suits(optimizer, group)]
    for group in _in_step[optimizer]:
        group["fused"] = True
    if any(group["fused"] for group in optimizer.param_groups):
        _match_layouts(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for group in _in_step.pop(optimizer, ()):
        group["fused"] = None


def _suits(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether the fused implementation computes the same as the others in the next step.

    In torch 2.8 to 2.13, it ignores strides, and its momentum is wrong in bf16.  SGD's needs the momentum of
    all parameters that have a gradient, or of none.
    """
    is_chosen = group["foreach"] is not None or group["fused"] is not None
    if is_chosen or group.get("differentiable") or group.get("capturable"):
        return False
    if not all(map(_is_plain, group["params"])):
        return False
    trained = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not all(each.grad.layout is torch.strided and _have_same_layout(each.grad, each) for each in trained):
        return False
    if not group.get("momentum"):
        return True
    buffers = [optimizer.state.get(each, {}).get("momentum_buffer") for each in trained]
    return len({buffer is None for buffer in buffers}) <= 1


def _is_plain(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a tensor of fp32 or fp64 without gaps.  A DTensor of FSDP2 isn't."""
    return (
        type(parameter) in (nn.Parameter, torch.Tensor)
        and parameter.is_cpu
        and parameter.dtype in (torch.float32, torch.float64)
        and parameter.layout is torch.strided
        and (
            parameter.is_contiguous()
            or (parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last))
        )
    )


def _have_same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of the same shape have their elements in the same order in memory."""
    if one.stride() == other.stride():
        return True
    return all(
        a == b or size == 1 for size, a, b in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


def _match_layouts(optimizer: Optimizer) -> None:
    """Convert states to the layout of their parameters, which the fused implementation needs."""
    for parameter, state in optimizer.state.items():
        strides = parameter.stride()
        for name, value in state.items():
            if (
                isinstance(value, torch.Tensor)
                and value.stride() != strides
                and value.shape == parameter.shape
                and not _have_same_layout(value, parameter)
            ):
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
