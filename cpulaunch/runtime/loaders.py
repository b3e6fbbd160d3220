"""Shards data loaders over the ranks."""

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
    """A DistributedSampler that shuffles in each epoch even if the script doesn't call ``set_epoch``."""

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


def shard(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader for this rank's shard of the data, with the batch size of ``loader``.

    If the data don't divide evenly, some examples are repeated, so that all ranks make the same number of
    steps.  Every rank must call this, because rank 0 broadcasts the seed for shuffling.  Raises UsageError if
    the loader's sampler can't be sharded.
    """
    if distributed.world_size() == 1 or isinstance(loader.sampler, DistributedSampler):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        log_once(f"{type(loader.dataset).__name__} is an IterableDataset: it must shard its data itself")
        return loader
    if (custom := _custom_sampler(loader)) is not None:
        raise UsageError(
            f"prepare can't shard a data loader with a {type(custom).__name__}: shard the data in this "
            "sampler (cpulaunch.rank(), cpulaunch.world_size()), and don't pass the loader to prepare"
        )
    sampler = EpochSampler(
        loader.dataset,
        num_replicas=distributed.world_size(),
        rank=distributed.rank(),
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=distributed.broadcast_object(torch.initial_seed() % 2**31),
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
    """Return a sampler or batch sampler that a DistributedSampler can't replace; None if there is none."""
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return loader.batch_sampler
    if type(loader.sampler) not in (SequentialSampler, RandomSampler):
        return loader.sampler
    return loader.sampler if getattr(loader.sampler, "replacement", False) else None
