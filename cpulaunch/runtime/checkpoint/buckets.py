"""The order in which DDP sums gradients, which a restarted job has to keep to reproduce sums bit by bit.

After its first backward pass, DDP sorts gradients into buckets again, in the order in which they arrived.
The place in a bucket decides which rank adds first, so the bits of a sum of three or more numbers depend on
it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_NEEDS = ("_get_zeros_like_grad_buckets", "_rebuild_buckets")


def order(model: nn.Module) -> list[str] | None:
    """Return the names of a DDP model's parameters in the order of its buckets, as of its next backward pass.

    None if it has no such order: another kind of model, or one whose buckets don't change.  Every rank has to
    call this, between two steps, once the model has had a backward pass.
    """
    reducer = _reducer(model)
    if reducer is None:
        return None
    reducer._rebuild_buckets()  # the next forward pass would do the same
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    buckets = reducer._get_zeros_like_grad_buckets()
    found = [names.get(id(parameter)) for bucket in buckets for parameter in bucket.parameters()]
    return None if None in found else [name for name in found if name]


def rebuild(model: nn.Module, names: list[str]) -> None:
    """Order the buckets of a DDP model that has had no backward pass yet as in ``names``.

    Runs a backward pass with artificial gradients, which arrive in this order; gradients are cleared after
    it.  Every rank has to call this.
    """
    reducer: Any = _reducer(model)
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if reducer is None or parameters.keys() != set(names):
        return
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        model._pre_forward()  # type: ignore[operator]
        # Autograd starts with the tensor that was computed last.
        sums = [parameters[name].sum().float() for name in reversed(names)]
        model._post_forward(torch.stack(sums).sum()).backward()  # type: ignore[operator]
    for parameter in parameters.values():
        parameter.grad = None
    reducer._rebuild_buckets()


def _reducer(model: nn.Module) -> Any:
    """Return DDP's reducer if it reorders buckets and has everything that is needed here."""
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return None
    reducer = getattr(model, "reducer", None)
    if not all(hasattr(reducer, name) for name in _NEEDS) or not hasattr(model, "_pre_forward"):
        return None
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    return None if sparse else reducer
