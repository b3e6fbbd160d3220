"""The engine ipex: bf16 by Intel's extension for PyTorch (IPEX), with packed and split weights.

IPEX splits an fp32 weight: the parameter has the top 16 bits as bf16, and ``optimizer.params_attr`` the
bottom 16 bits.  It has fused steps for Adam, SGD and Adagrad; this module adds one for AdamW.
"""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Collection
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from cpulaunch.runtime.change.engines.base import Engine, Measured

FUSED = (Adam, AdamW, SGD, Adagrad)
"""Optimizers with a fused step on split weights."""


class IpexEngine(Engine):
    """The IPEX engine.  ``version``: IPEX's version; None means the installed version."""

    name = "ipex"
    needs_optimizer = True
    broadcast_first = True
    # Measured by scripts/bench/training.py.
    measured = (
        Measured("amx_bf16", "2.8", 0.93, "BERT of 4 layers on one core, docs/performance-measured.md"),
    )

    def __init__(self, version: str | None = None) -> None:
        self._version = version

    def version(self) -> str | None:
        # Don't import IPEX, which ends the process if torch has another version.
        try:
            return self._version or metadata.version("intel_extension_for_pytorch")
        except metadata.PackageNotFoundError:
            return None

    def unavailable(self, torch_version: str, cpu_flags: Collection[str] | None) -> str | None:
        version = self.version()
        if version is None:
            return "IPEX is not installed (it needs a separate environment with torch 2.8)"
        if _series(version) != _series(torch_version):
            return (
                f"IPEX {version} is for torch {_series(version)}.*, and this is torch {torch_version} "
                "(cpulaunch's extra `intel` installs a matching pair in a separate environment)"
            )
        if cpu_flags is not None and not {"amx_bf16", "avx512_bf16"} & set(cpu_flags):
            return "IPEX does bf16 only on CPUs with instructions for it (amx_bf16, avx512_bf16)"
        return _unfit_transformers(version)

    def problem(self, model: nn.Module, optimizer: Optimizer | None) -> str | None:
        if type(optimizer) not in FUSED:
            names = ", ".join(kind.__name__ for kind in FUSED)
            return f"IPEX has no fused step for {type(optimizer).__name__}; it has for {names}"
        assert optimizer is not None
        if optimizer.state:
            return f"its {type(optimizer).__name__} has a state already: load checkpoints after prepare"
        return None

    def apply(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Change model and optimizer in place; a model of a single layer is replaced by another object."""
        import intel_extension_for_pytorch as ipex

        _complete_ipex()
        training = model.training
        model.train()
        model, _ = ipex.optimize(
            model,
            optimizer=optimizer,
            dtype=torch.bfloat16,
            inplace=True,
            split_master_weight_for_bf16=True,
            fuse_update_step=True,
        )
        model.train(training)
        assert optimizer is not None
        for group in optimizer.param_groups:
            if "fused" in group:
                group["fused"] = False  # torch's fused step doesn't support split weights
        _restore_hooks(optimizer)
        return model


ENGINE = IpexEngine()


def _series(version: str) -> str:
    """Return ``"2.8"`` for ``"2.8.0+cpu"``."""
    return ".".join(re.findall(r"\d+", version)[:2])


def _unfit_transformers(version: str) -> str | None:
    """Return why IPEX can't be imported with the installed transformers; None if it can.

    IPEX imports a module that transformers 5.24 has removed, and fails with a NameError.
    """
    spec = util.find_spec("transformers")
    if spec is None or not spec.origin or Path(spec.origin).with_name("modeling_attn_mask_utils.py").exists():
        return None
    return (
        f"IPEX {version} can't be imported with transformers {metadata.version('transformers')} "
        "(pip install 'transformers<5.24')"
    )


def _complete_ipex() -> None:
    """Add a fused AdamW to IPEX 2.8, and fix the loading of split weights."""
    from intel_extension_for_pytorch.nn.utils._parameter_wrapper import ParameterWrapper
    from intel_extension_for_pytorch.optim import _optimizer_utils as table

    if table.OPTIMIZER_FUSED_STEP_MAPPING_CPU.get(AdamW) is adamw_step:
        return
    # These two tables define which optimizers IPEX supports, and their steps.
    table.OPTIMIZER_FUSED_STEP_MAPPING_CPU[AdamW] = adamw_step
    if AdamW not in table.IPEX_FUSED_OPTIMIZER_LIST_CPU:
        table.IPEX_FUSED_OPTIMIZER_LIST_CPU.append(AdamW)
    load_whole = ParameterWrapper.load

    def load(self: Any, module: nn.Module, weights: torch.Tensor) -> None:
        if self.split:
            _load_split(self, weights)
        else:
            load_whole(self, module, weights)

    ParameterWrapper.load = load
    # IPEX warns of parameters that a later release would remove, but 2.8 is the last release.
    logging.getLogger("IPEX").setLevel(logging.ERROR)


def _load_split(wrapper: Any, weights: torch.Tensor) -> None:
    """Copy ``weights`` into the memory of a ``ParameterWrapper`` with split weights.

    IPEX 2.8.0 would free this memory, while convolutions still use it.
    """
    top, bottom = torch.ops.torch_ipex.split_float_bfloat16(weights.detach().float().contiguous())
    if wrapper.op_ctx is not None and weights.dim() > 1:  # biases are not packed
        if wrapper.weight_channels_last:
            top, bottom = (half.contiguous(memory_format=_channels_last(half)) for half in (top, bottom))
        top, bottom = wrapper.op_ctx.pack(top), wrapper.op_ctx.pack(bottom)
    wrapper.parameter.data.copy_(top)
    wrapper.parameter_trail.copy_(bottom)


def _channels_last(weights: torch.Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats.get(weights.dim(), torch.contiguous_format)


def _restore_hooks(optimizer: Optimizer) -> None:
    """Make IPEX's step call torch's step hooks, and set the attribute that learning rate schedulers check."""
    function = Optimizer.profile_hook_step(optimizer.step.__func__)  # type: ignore[attr-defined]

    def step(self: Optimizer, closure: Any = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]
        return function(self, closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


@torch.no_grad()
def adamw_step(self: Any, closure: Any = None) -> Any:
    """Do a step of AdamW on split weights: weight decay, p ← p·(1 − lr·wd), then IPEX's Adam step.

    The algorithm is the same as in torch.optim.AdamW (Loshchilov and Hutter, arXiv:1711.05101).  The decay
    uses the top 16 bits of a weight, which differ from the weight by less than 2⁻⁷ of it.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in self.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _step_one(parameter, self.state[parameter], self.params_attr.get(parameter), group)
    return loss


def _step_one(parameter: torch.Tensor, state: dict[str, Any], attribute: Any, group: dict[str, Any]) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise RuntimeError("AdamW does not support sparse gradients")
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    if not state:
        state["step"] = torch.tensor(0.0)
        for name in names:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)
    state["step"] += 1
    step = state["step"].item()
    if group["maximize"]:
        gradient = -gradient
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    trail = getattr(attribute, "parameter_trail", None)  # None for fp32 weights, such as a norm's
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    decay = lr * group["weight_decay"]
    bottom = torch.Tensor() if trail is None else trail
    if decay and trail is not None:
        # p += -decay · top.  The operation supports the same tensor as input and output.
        torch.ops.torch_ipex.packed_add(parameter.data, bottom, parameter.data, -decay)
    elif decay:
        parameter.data.mul_(1 - decay)
    largest = state["max_exp_avg_sq"] if group["amsgrad"] else torch.Tensor()
    torch.ops.torch_ipex.adam_fused_step(
        parameter.data,
        state["exp_avg"],
        state["exp_avg_sq"],
        largest,
        gradient,
        bottom,
        group["amsgrad"],
        step,
        beta1,
        beta2,
        lr,
        0.0,  # the weight decay, which is done already
        group["eps"],
    )
