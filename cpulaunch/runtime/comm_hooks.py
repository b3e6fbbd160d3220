"""Communication hooks for DDP.

No ``from __future__ import annotations`` here: DDP compares the annotations of a hook with classes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket


def average_in_shared_memory(
    share: Callable[[torch.Tensor], bool], bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: ``share`` moves gradients to memory that the ranks of a host share.

    There the ranks reduce them without copying them.  DDP keeps its buckets, but for those of the first step.
    """
    gradients = bucket.buffer()
    share(gradients)
    work = dist.all_reduce(gradients, dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return averaged


def average_in_bf16(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: gradients are sent and summed in bf16.

    This is torch's ``bf16_compress_hook``, which DDP refuses on CPUs by its name.
    """
    return _average(bucket, torch.bfloat16)


def average_in_fp32(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: gradients are sent and summed in fp32, also those of bf16 parameters."""
    return _average(bucket, torch.float32)


def _average(bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    sent = gradients.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None

    def store(future: Any) -> torch.Tensor:
        gradients.copy_(future.value()[0])
        return gradients

    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(store)
    return averaged
