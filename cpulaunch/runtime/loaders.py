"""Data loaders that are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from cpulaunch.errors import UsageError
from cpulaunch.runtime import distributed
from cpulaunch.runtime.log import log_once


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler that shuffles anew in each epoch without ``set_epoch``, which still works."""

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


def shard(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader like ``loader`` for this rank's shard of the data, with the same batch size.

    If the data don't divide evenly, the last ranks get some examples twice, so that all ranks take the same
    number of steps.  Every rank has to call this, as rank 0's seed shuffles the data.  Raises UsageError for
    a loader whose sampler can't be sharded.
    """
    if distributed.world_size() == 1 or isinstance(loader.sampler, DistributedSampler):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        log_once(f"{type(loader.dataset).__name__} is an IterableDataset: it has to shard its data by itself")
        return loader
    if (custom := _custom_sampler(loader)) is not None:
        raise UsageError(
            f"prepare can't shard a data loader with a {type(custom).__name__} of its own: let that sampler "
            "give each rank its shard (cpulaunch.rank(), cpulaunch.world_size()), and leave the loader "
            "out of prepare"
        )
    sampler = EpochSampler(
        loader.dataset,
        num_replicas=distributed.world_size(),
        rank=distributed.rank(),
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=distributed.broadcast_number(torch.initial_seed() % 2**31),
        drop_last=loader.drop_last,
    )
    return type(loader)(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _custom_sampler(loader: DataLoader[Any]) -> object | None:
    """Return the sampler or batch sampler that a DistributedSampler can't replace, if there is one."""
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return loader.batch_sampler
    if type(loader.sampler) not in (SequentialSampler, RandomSampler):
        return loader.sampler
    return loader.sampler if getattr(loader.sampler, "replacement", False) else None
