"""Communication hooks for DDP.

No ``from __future__ import annotations`` here: DDP compares the annotations of a hook with classes.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

Averaged = torch.futures.Future[torch.Tensor]
Hook = Callable[[object, GradBucket], Averaged]


def hook_for(model: nn.Module, *, compress: bool) -> Hook | None:
    """Return the hook by which DDP averages the model's gradients over all ranks; None for DDP's default."""
    group = _backend()
    hosts = getattr(group, "compressing_hosts", 0)  # 0: not cpulaunch's own transport
    if compress and hosts != 1:
        return average_compressed if hosts else average_in_bf16
    in_bf16 = any(p.dtype is torch.bfloat16 and p.requires_grad for p in model.parameters())
    if in_bf16 and dist.get_world_size() > 2:
        # A sum of two is rounded once in either precision; longer sums are rounded at each addition.
        return average_in_fp32
    # All ranks must choose alike, also one that is alone on its host.
    return average_in_place if 0 < hosts < dist.get_world_size() else None


def average_by(model: DistributedDataParallel, hook: Hook) -> None:
    """Average the model's gradients by this hook, unless the script registers one of its own."""
    state = [None, hook]
    model.register_comm_hook(state, _delegate)
    # A weak reference: the model and its buckets' memory must be freed with their last user.
    model.register_comm_hook = partial(_register, weakref.ref(model), state)  # type: ignore[method-assign]


def _register(reference: Callable[[], Any], ours: list[Any], state: object, hook: Any) -> None:
    model = reference()
    model._check_comm_hook(hook)
    ours[:] = state, hook
    del model.register_comm_hook  # torch's method raises an error at a second hook


def _delegate(state: list[Any], bucket: GradBucket) -> Averaged:
    """Call another DDP communication hook; ``state`` holds that hook's state, and the hook."""
    its_state, hook = state
    averaged: Averaged = hook(its_state, bucket)
    return averaged


def average_in_place(state: object, bucket: GradBucket) -> Averaged:
    """Sum gradients in place, in memory that a host's ranks share.  A DDP communication hook."""
    work = dist.all_reduce(_in_shared_memory(bucket), dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    averaged: Averaged = work.get_future().then(_only_tensor)
    return averaged


def average_compressed(state: object, bucket: GradBucket) -> Averaged:
    """Average like `average_in_place`, with fp32 gradients sent in bf16 between hosts.  A DDP hook.

    For groups whose ``compressing_hosts`` is not 0.
    """
    gradients = _in_shared_memory(bucket)
    averaged: Averaged = _backend().average_compressed(gradients).get_future().then(_only_tensor)
    return averaged


def average_in_bf16(state: object, bucket: GradBucket) -> Averaged:
    """Send and sum gradients in bf16.  A DDP communication hook.

    Equivalent to torch's ``bf16_compress_hook``, which DDP rejects on CPUs by its name.
    """
    return _average(bucket, torch.bfloat16)


COMPRESSING = (average_compressed, average_in_bf16)


def average_in_fp32(state: object, bucket: GradBucket) -> Averaged:
    """Send and sum gradients in fp32, including those of bf16 parameters.  A DDP communication hook."""
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
    """Move the bucket to shared memory, once: DDP keeps its buckets, except those of the first step."""
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
