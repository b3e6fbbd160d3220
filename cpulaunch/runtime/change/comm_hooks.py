"""Communication hooks for DDP.

This module doesn't use ``from __future__ import annotations``, because DDP checks the annotations of hooks.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

Averaged = torch.futures.Future[torch.Tensor]
Hook = Callable[[object, GradBucket], Averaged]

# The states of hooks that the script may replace.  They are not attributes, as models are copied and pickled.
_replaceable: weakref.WeakKeyDictionary[DistributedDataParallel, list[Any]] = weakref.WeakKeyDictionary()


def hook_for(model: nn.Module, *, compress: bool) -> Hook | None:
    """Return the hook that averages the model's gradients over all ranks; None for DDP's own averaging."""
    group = _backend()
    hosts = getattr(group, "compressing_hosts", 0)  # 0 for transports other than cpulaunch's own
    if compress and hosts != 1:
        return average_compressed if hosts else average_in_bf16
    in_bf16 = any(p.dtype is torch.bfloat16 and p.requires_grad for p in model.parameters())
    if in_bf16 and dist.get_world_size() > 2:
        # With three or more ranks, a sum in bf16 is rounded more than once.
        return average_in_fp32
    # All ranks must use the same hook, even a rank that shares no memory because it is alone on its host.
    return average_in_place if 0 < hosts < dist.get_world_size() else None


def average_by(model: DistributedDataParallel, hook: Hook) -> None:
    """Register a hook, which `replace` may replace with the script's."""
    state = [None, hook]
    model.register_comm_hook(state, _delegate)
    _replaceable[model] = state


def replace(model: DistributedDataParallel, state: object, hook: Any) -> bool:
    """Replace the hook that `average_by` registered, if any; return whether there was one.

    torch's own method raises an error at a second hook.
    """
    if model not in _replaceable:
        return False
    model._check_comm_hook(hook)  # type: ignore[no-untyped-call]
    _replaceable.pop(model)[:] = state, hook
    return True


def _delegate(state: list[Any], bucket: GradBucket) -> Averaged:
    """Call the hook in ``state``, which is a hook's state and the hook."""
    its_state, hook = state
    averaged: Averaged = hook(its_state, bucket)
    return averaged


def average_in_place(state: object, bucket: GradBucket) -> Averaged:
    """Average gradients in place, in memory that the ranks of a host share.  A DDP communication hook."""
    if bucket.buffer().is_sparse:
        return _average(bucket, bucket.buffer().dtype)
    work = dist.all_reduce(_in_shared_memory(bucket), dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    averaged: Averaged = work.get_future().then(_only_tensor)
    return averaged


def average_compressed(state: object, bucket: GradBucket) -> Averaged:
    """Average like `average_in_place`, but send fp32 gradients in bf16 between hosts.  A DDP hook.

    The group's ``compressing_hosts`` must not be 0.  Sparse gradients are not compressed.
    """
    if bucket.buffer().is_sparse:
        return _average(bucket, bucket.buffer().dtype)
    gradients = _in_shared_memory(bucket)
    averaged: Averaged = _backend().average_compressed(gradients).get_future().then(_only_tensor)
    return averaged


def average_in_bf16(state: object, bucket: GradBucket) -> Averaged:
    """Send and sum gradients in bf16.  A DDP communication hook.

    DDP rejects torch's equivalent ``bf16_compress_hook`` on CPUs.
    """
    return _average(bucket, torch.bfloat16)


COMPRESSING = (average_compressed, average_in_bf16)


def average_in_fp32(state: object, bucket: GradBucket) -> Averaged:
    """Send and sum gradients in fp32, including gradients of bf16 parameters.  A DDP communication hook."""
    return _average(bucket, torch.float32)


def _average(bucket: GradBucket, dtype: torch.dtype) -> Averaged:
    gradients = bucket.buffer()
    sent = gradients.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None

    def store(future: Any) -> torch.Tensor:
        gradients.copy_(_only_tensor(future))
        return gradients

    averaged: Averaged = work.get_future().then(store)
    return averaged


def _in_shared_memory(bucket: GradBucket) -> torch.Tensor:
    """Move the bucket to shared memory, if it isn't there yet."""
    gradients, group = bucket.buffer(), _backend()
    if group.shares_memory:
        group.share_memory(gradients)
    return gradients


def _backend() -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group._get_backend(torch.device("cpu"))


def _only_tensor(future: Any) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor
