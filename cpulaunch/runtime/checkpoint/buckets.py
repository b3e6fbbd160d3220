"""The order in which DDP sums gradients, which a restarted job has to keep for its sums to be the same bits.

After its first backward pass, DDP sorts gradients into buckets anew, in the order in which they came.  A sum
of three or more numbers depends on the place in the bucket, as that decides which rank adds first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_NEEDS = ("_get_zeros_like_grad_buckets", "_rebuild_buckets")


def order(model: nn.Module) -> list[str] | None:
    """The names of a DDP model's parameters in the order of its buckets, as of its next backward pass.

    None where it has no such order: another kind of model, or one whose buckets stay as they are.  Every rank
    has to call this, between two steps, once the model has had a backward pass.
    """
    reducer = _reducer(model)
    if reducer is None:
        return None
    reducer._rebuild_buckets()  # as the next forward pass would
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    buckets = reducer._get_zeros_like_grad_buckets()
    found = [names.get(id(parameter)) for bucket in buckets for parameter in bucket.parameters()]
    return None if None in found else [name for name in found if name]


def rebuild(model: nn.Module, names: list[str]) -> None:
    """Give a DDP model that has had no backward pass yet its buckets, in this order.

    This takes a backward pass of made-up gradients, each of which arrives at its place in ``names``.  Every
    rank has to call this.  Gradients are gone then.
    """
    reducer: Any = _reducer(model)
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if reducer is None or parameters.keys() != set(names):
        return
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        model._pre_forward()  # type: ignore[operator]
        # Autograd takes what was computed last first.
        sums = [parameters[name].sum().float() for name in reversed(names)]
        model._post_forward(torch.stack(sums).sum()).backward()  # type: ignore[operator]
    for parameter in parameters.values():
        parameter.grad = None
    reducer._rebuild_buckets()


def _reducer(model: nn.Module) -> Any:
    """DDP's reducer, where it sorts buckets anew and all that is needed here is there."""
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return None
    reducer = getattr(model, "reducer", None)
    if not all(hasattr(reducer, name) for name in _NEEDS) or not hasattr(model, "_pre_forward"):
        return None
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    return None if sparse else reducer
