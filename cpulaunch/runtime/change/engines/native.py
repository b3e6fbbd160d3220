"""The engines torch and native: autocast, fused optimizers, and channels_last for convolutions.

The engine native also uses cpulaunch's kernels.
"""

from __future__ import annotations

import weakref
from functools import partial
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
            optimize_optimizer(optimizer)
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

_fused_here: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def optimize_optimizer(optimizer: Optimizer) -> None:
    """Enable the fused implementation if possible, and give states the layout of their parameters."""
    fuse(optimizer)
    keep_layouts(optimizer)


def fuse(optimizer: Optimizer) -> bool:
    """Enable the fused implementation; return False if there is none, or if the script has chosen another.

    It is disabled again before a step with sparse gradients, which it doesn't support.
    """
    if type(optimizer) not in FUSED or _has_sparse_gradients(optimizer):
        return False
    if not all(_can_fuse(group) for group in optimizer.param_groups):
        return False
    _switch(optimizer, True)
    _fused_here.add(optimizer)
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_step_pre_hook(_disable_if_sparse)
    return True


def _disable_if_sparse(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _fused_here and _has_sparse_gradients(optimizer):
        _fused_here.discard(optimizer)
        _switch(optimizer, None)


def _switch(optimizer: Optimizer, fused: bool | None) -> None:
    for group in optimizer.param_groups:
        group["fused"] = fused


def _has_sparse_gradients(optimizer: Optimizer) -> bool:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return any(p.grad is not None and p.grad.is_sparse for p in parameters)


def _can_fuse(group: dict[str, Any]) -> bool:
    chosen = group.get("foreach") is not None or group.get("fused") is not None
    conflicts = group.get("differentiable") or group.get("capturable")
    return not (chosen or conflicts) and all(_is_dense(parameter) for parameter in group["params"])


def _is_dense(parameter: torch.Tensor) -> bool:
    dense = parameter.device.type == "cpu" and parameter.is_floating_point() and not parameter.is_sparse
    return dense and type(parameter.data) is torch.Tensor  # not a DTensor of FSDP2


def keep_layouts(optimizer: Optimizer) -> None:
    """Convert states to the layout of their parameters, now and after each ``load_state_dict``.

    The fused implementations of torch 2.8 to 2.13 compute wrong numbers if the layouts differ.
    """
    _match_layouts(optimizer)
    chosen = None if optimizer in _fused_here else optimizer.param_groups[0].get("fused")
    optimizer.register_load_state_dict_post_hook(partial(_after_loading, chosen))


def _match_layouts(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _after_loading(chosen: bool | None, optimizer: Optimizer) -> None:
    # Loading has replaced the script's choice by the choice in the checkpoint.
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"] = chosen
    fuse(optimizer)
    _match_layouts(optimizer)
