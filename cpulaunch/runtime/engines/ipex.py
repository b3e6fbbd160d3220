"""bf16 by Intel's extension for PyTorch (IPEX): prepacked weights, split into bf16 and the missing bits.

The top 16 bits of a weight are the parameter, the bottom 16 lie in ``optimizer.params_attr``: together they
are fp32, so that training and checkpoints lose nothing.  IPEX has fused steps for Adam, SGD and Adagrad;
for AdamW, which it has not, there is one here.
"""

from __future__ import annotations

import logging
import types
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

FUSED = (Adam, AdamW, SGD, Adagrad)
"""The optimizers with a fused step on split weights."""


def optimize(model: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Prepare ``model`` and ``optimizer``, which is one of FUSED, in place, and return the model.

    A model that is a single layer comes back as another object.
    """
    import intel_extension_for_pytorch as ipex
    from intel_extension_for_pytorch.nn.utils._parameter_wrapper import ParameterWrapper
    from intel_extension_for_pytorch.optim import _optimizer_utils as table

    if ParameterWrapper.load is not _load:
        _load.otherwise = ParameterWrapper.load  # type: ignore[attr-defined]
        ParameterWrapper.load = _load
    # IPEX looks here for the optimizers whose weights it splits, and for their steps.
    table.OPTIMIZER_FUSED_STEP_MAPPING_CPU[AdamW] = adamw_step
    if AdamW not in table.IPEX_FUSED_OPTIMIZER_LIST_CPU:
        table.IPEX_FUSED_OPTIMIZER_LIST_CPU.append(AdamW)
    # It warns of two parameters that a later release would have dropped; 2.8 is the last one.
    logging.getLogger("IPEX").setLevel(logging.ERROR)
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
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"] = False  # torch's own
    _restore_hooks(optimizer)
    return model


def _load(self: Any, module: nn.Module, weights: torch.Tensor) -> None:
    """Load split weights into the memory where they are: what IPEX's ``ParameterWrapper.load`` is for.

    IPEX 2.8.0 makes a packed weight anew; convolutions then compute with memory that is nobody's any more.
    """
    if not self.split:
        _load.otherwise(self, module, weights)  # type: ignore[attr-defined]
        return
    top, bottom = torch.ops.torch_ipex.split_float_bfloat16(weights.detach().float().contiguous())
    if self.op_ctx is not None and weights.dim() > 1:  # packed, which biases are not
        if self.weight_channels_last:
            top, bottom = (half.contiguous(memory_format=_channels_last(half)) for half in (top, bottom))
        top, bottom = self.op_ctx.pack(top), self.op_ctx.pack(bottom)
    self.parameter.data.copy_(top)
    self.parameter_trail.copy_(bottom)


def _channels_last(weights: torch.Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats.get(weights.dim(), torch.contiguous_format)


def _restore_hooks(optimizer: Optimizer) -> None:
    """Let the step that IPEX put in run torch's step hooks, and count for learning rate schedulers."""
    function = Optimizer.profile_hook_step(optimizer.step.__func__)  # type: ignore[attr-defined]

    def step(self: Optimizer, closure: Any = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]
        return function(self, closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


@torch.no_grad()
def adamw_step(self: Any, closure: Any = None) -> Any:
    """One step of AdamW on split weights: decoupled decay, p ← p·(1 − lr·wd), and then IPEX's Adam step.

    As torch.optim.AdamW (Loshchilov and Hutter, arXiv:1711.05101).  The decay is computed from the top half
    of a weight, which differs from the whole by less than 2⁻⁷ of it.
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
    trail = getattr(attribute, "parameter_trail", None)  # none for weights that stay fp32, such as a norm's
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    decay = lr * group["weight_decay"]
    bottom = torch.Tensor() if trail is None else trail
    if decay and trail is not None:
        # p += -decay · top: each element is read before it is written, so the two may be the same.
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
        0.0,  # the decay is done
        group["eps"],
    )
