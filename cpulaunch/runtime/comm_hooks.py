"""Communication hooks for DDP.

No ``from __future__ import annotations`` here: DDP compares the annotations of a hook with classes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

Averaged = torch.futures.Future[torch.Tensor]
Hook = Callable[[object, GradBucket], Averaged]


def compressing_hook() -> Hook | None:
    """The hook that sends gradients in bf16 through the group of all ranks; None where none is needed.

    That is where cpulaunch's own transport carries the collectives of one host: it sends nothing.
    """
    hosts = getattr(_backend(), "compressing_hosts", 0)
    if hosts == 1:
        return None
    return average_compressed if hosts > 1 else average_in_bf16


def average_compressed(state: object, bucket: GradBucket) -> Averaged:
    """A DDP communication hook: gradients are summed in fp32 on each host, and sent between hosts in bf16.

    For groups whose ``compressing_hosts`` is not 0.  Gradients of other types are sent as they are.
    """
    averaged: Averaged = _backend().average_compressed(bucket.buffer()).get_future().then(_only_tensor)
    return averaged


def average_in_bf16(state: object, bucket: GradBucket) -> Averaged:
    """A DDP communication hook: gradients are sent and summed in bf16.

    This is torch's ``bf16_compress_hook``, which DDP refuses on CPUs by its name.
    """
    return _average(bucket, torch.bfloat16)


def average_in_fp32(state: object, bucket: GradBucket) -> Averaged:
    """A DDP communication hook: gradients are sent and summed in fp32, also those of bf16 parameters."""
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


def _backend() -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group._get_backend(torch.device("cpu"))


def _only_tensor(future: Any) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor
