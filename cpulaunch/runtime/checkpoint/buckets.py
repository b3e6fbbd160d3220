"""Saves and restores the order of gradients in DDP's buckets, so that sums are the same after a restart.

After its first backward pass, DDP rebuilds its buckets in the order in which the gradients became ready.  The
position in a bucket decides in which order an all-reduce adds the ranks' numbers.  With three or more ranks,
the rounding error depends on this order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_NEEDS = ("_get_zeros_like_grad_buckets", "_rebuild_buckets")


def order(model: nn.Module) -> list[str] | None:
    """Return the names of a DDP model's parameters in the order of its buckets in the next backward pass.

    None if the model isn't in DDP, or if DDP doesn't rebuild its buckets.  Every rank must call this, between
    two steps, after the first backward pass.
    """
    reducer = _reducer(model)
    if reducer is None:
        return None
    reducer._rebuild_buckets()  # otherwise, the next forward pass does this
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    buckets = reducer._get_zeros_like_grad_buckets()
    found = [names.get(id(parameter)) for bucket in buckets for parameter in bucket.parameters()]
    return None if None in found else [name for name in found if name]


def rebuild(model: nn.Module, names: list[str]) -> None:
    """Rebuild the buckets of a DDP model in the order of ``names``, before its first backward pass.

    Runs a backward pass in which gradients become ready in this order, and then clears them.  Every rank must
    call this.
    """
    reducer: Any = _reducer(model)
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if reducer is None or parameters.keys() != set(names):
        return
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        model._pre_forward()  # type: ignore[operator]
        # The backward pass starts with the last tensor.
        sums = [parameters[name].sum().float() for name in reversed(names)]
        model._post_forward(torch.stack(sums).sum()).backward()  # type: ignore[operator]
    for parameter in parameters.values():
        parameter.grad = None
    reducer._rebuild_buckets()


def _reducer(model: nn.Module) -> Any:
    """Return DDP's reducer if it rebuilds buckets and has the private methods used here; else None."""
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return None
    reducer = getattr(model, "reducer", None)
    if not all(hasattr(reducer, name) for name in _NEEDS) or not hasattr(model, "_pre_forward"):
        return None
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    return None if sparse else reducer
